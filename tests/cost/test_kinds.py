"""One step of every kind of program: modelled time beside what an H100 measured, modelled memory beside XLA's GPU compiler."""

import jax
import pytest

from benchmarks.kind_steps import STEPS
from benchmarks.kinds import calibrated, measured, plan, row
from shardfn.compiled import targets
from shardfn.compiled.executable import read
from shardfn.cost.devices.chips import CHIPS

FOUND = measured("h100")
CHIP = calibrated(FOUND)

# What the model does not reach within 15 % of the time, and within 10 % of the memory that XLA assigned on the card.
TIME_IS_OFF = {"ssm_associative", "graph_net"}
MEMORY_IS_OFF = {"topk_sort"}
QUICK = ["topk_sort", "moe_ragged", "nbody", "stencil_loop", "cholesky_gp", "poisson_fft"]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in STEPS])
def test_time_and_memory_are_those_of_the_card(name):
    found = row(name, CHIP, FOUND)
    assert (abs(found["measured / modelled"] - 1) > 0.15) == (name in TIME_IS_OFF)
    assert (abs(found["predicted / compiled"] - 1) > 0.1) == (name in MEMORY_IS_OFF)


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_modelled_or_say_what_is_not(name):
    unknown = {"gpt_bf16_cudnn_attention": {"custom_call"}}.get(name, set())
    step = STEPS[name](True)
    assert jax.tree.leaves(step.shapes)
    if name in QUICK:
        ops = plan(name, CHIPS["h100"]).cost.unmodelled_ops
        assert {op.partition(" ")[0] for op in ops} <= unknown


# Without a GPU, XLA takes another sort than CUB's, and JAX finds no cuDNN for attention.
OTHERWISE = {"topk_sort", "gpt_bf16_cudnn_attention"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in STEPS if n not in OTHERWISE])
def test_memory_is_what_the_compiler_assigns(cuda, name):
    step = STEPS[name](False)
    (device,) = targets.devices(targets.target(CHIPS["h100"].pod(1)))
    on = jax.sharding.SingleDeviceSharding(device)
    traced = jax.jit(step.function, donate_argnums=step.donated, in_shardings=on).trace(*step.shapes)
    compiled, _ = targets.compiled_for("cuda", traced.lower(lowering_platforms=("cuda",)))
    peak = read(compiled).together("cuda")
    assert peak is not None
    assert plan(name, CHIP).cost.memory.peak == pytest.approx(peak, rel=0.1)

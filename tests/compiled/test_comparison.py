import dataclasses

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.compiled.comparison import compare
from shardfn.compiled.executable import Compiled, read
from shardfn.cost.devices.hardware import CHIPS, Hardware
from shardfn.cost.estimate import Cost
from shardfn.cost.memory.live_memory import MemoryEstimate
from shardfn.ir.model import Graph
from shardfn.ir.partitioned import Collective, PartitionedProgram
from shardfn.planning.plan import Decision, Plan

RESULTS = tuple(Decision(f"result/{i}", (), "float32", (), (), "propagated") for i in range(2))
PLAN = Plan(
    "f", Hardware(CHIPS["cpu"], "cpu", 8), 0, (("a", 8),), None, (), RESULTS, "",
    PartitionedProgram(Graph((), (), (), (), ()), (), {"a": 8}, ()),
    dimension_groups=(), collectives=(), cost=Cost(0, 0, MemoryEstimate(1000, 100, 500), 0, 0), diagnostics=(),
)  # fmt: skip
COMPILED = Compiled((), 0.0, 1000, 100, 500, 0, 1600)


def sent(kind, sent_bytes, trips=1, where="/w/model.py:7", dtype="f32"):
    return Collective(kind, ("a",), 8, (4,), dtype, sent_bytes, trips, where)


AR, AG, RS, A2A, CP = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"

# What was predicted, what was compiled, and the one line that explains it.
COLLECTIVES = {
    "equal": ([sent(AR, 8)], [sent(AR, 8)], None),
    "merged": ([sent(AR, 8), sent(AR, 16)], [sent(AR, 24)], "all-reduce: XLA merged 2 into 1, with the same bytes"),
    "split": ([sent(AG, 16)], [sent(AG, 8), sent(AG, 8)], "all-gather: XLA split 1 into 2, with the same bytes"),
    "moved out of a loop": (
        [sent(AG, 8, 6)], [sent(AG, 8, 1)],
        "all-gather at model.py:7: XLA hoists it out of a loop; predicted to run 6 times, it runs once",
    ),
    "kept in a loop": (
        [sent(AG, 8, 2)], [sent(AG, 8, 6)],
        "all-gather at model.py:7: XLA keeps it in the loop; predicted to run 2 times, it runs 6 times",
    ),
    "wider": ([sent(AR, 8, dtype="bf16")], [sent(AR, 16)], "all-reduce: XLA's cpu backend sends bf16 as f32"),
    "no reduce-scatter": (
        [sent(RS, 7)], [sent(AR, 14)],
        "XLA chooses another resharding: all-reduce at model.py:7 in place of reduce-scatter: "
        "every device receives the full sum and keeps its shard",
    ),
    "full rematerialisation": (
        [sent(A2A, 7, where="")], [sent(AG, 56)],
        "XLA chooses another resharding: all-gather at model.py:7 in place of all-to-all: "
        "the array is replicated and sliced again (full rematerialisation)",
    ),
    "two kinds in place of one": (
        [sent(A2A, 70)], [sent(A2A, 7), sent(AG, 56), sent(CP, 8)],
        "XLA chooses another resharding: all-gather and collective-permute at model.py:7 in place of all-to-all: "
        "the array is replicated and sliced again (full rematerialisation); or shards are exchanged in pairs",
    ),
    "not predicted": (
        [], [sent(AG, 8, where=f"/w/{name}.py:1") for name in "abcd"],
        "compiled but not predicted: all-gather at a.py:1, b.py:1 and 2 more",
    ),
    "fewer": (
        [sent(AG, 8), sent(AG, 8)], [sent(AG, 8)], "predicted, but XLA sends less: all-gather at model.py:7",
    ),
    "a loop at no known line": ([sent(AG, 8, 6, where="")], [sent(AG, 48, where="")], None),
    "not needed": ([sent(AG, 8)], [], "predicted, but XLA needs none: all-gather at model.py:7"),
}  # fmt: skip


@pytest.mark.parametrize(("predicted", "compiled", "why"), COLLECTIVES.values(), ids=list(COLLECTIVES))
def test_collectives_are_explained(predicted, compiled, why):
    plan = dataclasses.replace(PLAN, collectives=tuple(predicted))
    found = compare(plan, dataclasses.replace(COMPILED, collectives=tuple(compiled)))
    assert found.why == (() if why is None else (why,))


SIZES = {
    "arguments dropped": ({"argument_bytes": 900, "peak_bytes": 1500}, "arguments: XLA drops unused ones"),
    "tuple of results": ({"output_bytes": 116}, "results: XLA adds a table of pointers, 8 B for each result"),
    "donated": ({"alias_bytes": 80}, "donated arguments: 80 B of the results reuse their buffers"),
    "fused": (
        {"temp_bytes": 20},
        "temporaries: XLA fuses more ops than predicted, and fused intermediates take no memory",
    ),
    "more temporaries": (
        {"temp_bytes": 600}, "temporaries: XLA needs more for collective buffers, padding and copies",
    ),
    "a peak without temporaries": ({"peak_bytes": 1100}, None),
    "a finding": ({"diagnostics": ("loop at /w/m.py:3 runs on",)}, "in the compiled program: loop at m.py:3 runs on"),
    "more work": (
        {"flops": 64.0},
        "matmul work: XLA computes more; usually devices repeat work, or it lowers another op to matmuls",
    ),
    "nothing known": (
        dict.fromkeys(("argument_bytes", "output_bytes", "temp_bytes", "alias_bytes", "peak_bytes")), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "why"), SIZES.values(), ids=list(SIZES))
def test_sizes_are_explained(changes, why):
    found = compare(PLAN, dataclasses.replace(COMPILED, **changes))
    assert found.why == (() if why is None else (why,))


TPU = dataclasses.replace(PLAN, hardware=dataclasses.replace(PLAN.hardware, platform="tpu"))


@pytest.mark.parametrize(
    ("peak", "together", "why"),
    [
        (1600, 1600, ()),
        (1700, 1600, ("peak: XLA's own count includes the vector memory",)),
        (1200, 1200, ("temporaries: XLA counts buffers that share memory more than once, so the compiled peak is XLA's own",)),
    ],
)  # fmt: skip
def test_a_tpu_has_two_figures_of_all_at_once(peak, together, why):
    found = compare(TPU, dataclasses.replace(COMPILED, peak_bytes=peak))
    assert found.why == why
    assert dict(found.memory)["together"].compiled == together


def test_gaps_of_the_plan_are_said():
    unruled = "no sharding rule for: cumsum (/w/lib/model.py:20); XLA decides there"
    found = compare(dataclasses.replace(PLAN, diagnostics=(unruled, "something else")), COMPILED)
    assert found.why == ("in the plan: no sharding rule for: cumsum (model.py:20); XLA decides there",)


def test_numbers():
    plan = dataclasses.replace(PLAN, collectives=(sent(AR, 8, 3), sent(AR, 8)))
    found = compare(plan, dataclasses.replace(COMPILED, collectives=(sent(AR, 32),), alias_bytes=60))
    [(kind, predicted, actual)] = found.kinds
    assert kind == AR
    assert dataclasses.astuple(predicted) == (2, 4, 32)
    assert dataclasses.astuple(actual) == (1, 1, 32)
    memory = dict(found.memory)
    assert (memory["together"].predicted, memory["together"].compiled) == (1600, 1540)
    assert memory["together"].ratio == 1540 / 1600
    assert "xla_peak" not in memory, "a CPU's leaves temporaries out"


def test_a_layout_that_xla_resolves_its_own_way():
    """The operands are told to be gathered; XLA's CPU backend adds up partial products instead."""
    x, w = jnp.ones((64, 32)), jnp.ones((32, 128))
    function = shardfn.shard(jax.jit(lambda x, w: x @ w), ((1, 8), (8, 1)), ((8, 1),))
    found = compare(function.plan(x, w), read(function.lower(x, w).compile()))
    assert found.matrix_flops.ratio == 1
    kinds = {kind: (p.bytes_sent, c.bytes_sent) for kind, p, c in found.kinds}
    if any(p != c for p, c in kinds.values()):
        assert any("another resharding" in why for why in found.why)

"""Every mode takes the steps that one device takes, and what it composes shows in the compiled module."""

import functools
import json
import re
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import train
from shardfn.compiled.executable import read
from shardfn.cost import estimate
from shardfn.errors import ContextError, ShardError, StrategyError, StrategyTypeError
from shardfn.mindspore import auto_parallel
from tests.marks import some_slow
from tests.train.regression import data, mean_square, run, start

TENSOR = {"parameter_plan": {"w1": (1, 4), "b1": (4,), "w2": (4, 1)}, "in_strategy": ((2, 1), (2, 1))}


def zero(level, **more):
    return {
        "parallel_optimizer_config": {"optimizer_level": f"level{level}", "parallel_optimizer_threshold": 0, **more}
    }


RUNS = {  # beside the rows of test_pairs.py
    "auto": {"mode": "auto_parallel"},
    "auto, fastest": {"mode": "auto_parallel", "level": 2},
    "semi-auto, tensor parallel": {"mode": "semi_auto_parallel", **TENSOR},
    "tensor, micro-batches": {"mode": "semi_auto_parallel", "micro_batches": 4, **TENSOR},
    "tensor, cross batch": {"mode": "semi_auto_parallel", "cross_batch": True, **TENSOR},
    "data, level 3": {"mode": "data_parallel", **zero(3)},
    "data, groups of 4": {"mode": "data_parallel", **zero(2, optimizer_weight_shard_size=4)},
    "data, sums sharded": {"mode": "data_parallel", "micro_batches": 2, **zero(2, gradient_accumulation_shard=True)},
    "tensor, level 3": {"mode": "semi_auto_parallel", **TENSOR, **zero(3)},
}


@pytest.mark.parametrize("options", some_slow(RUNS, {"auto", "auto, fastest"}))
def test_losses_of_twenty_steps_are_those_of_one_device(options, alone):
    losses, state = run(train.step(mean_square, optax.adamw(1e-2), **options))
    np.testing.assert_allclose(losses, alone(), rtol=2e-4)
    assert losses[-1] < losses[0] / 2
    assert int(state.step) == 20


OPTIMIZERS = {
    "lamb": optax.lamb(1e-2),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "chain": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "masked": optax.masked(optax.adam(1e-2), {"w1": True, "b1": False, "w2": True}),
    "several": optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"w1": "a", "b1": "b", "w2": "a"}),
}


@pytest.mark.parametrize("name", some_slow([*OPTIMIZERS], ["lamb"]))
def test_any_optimizer_in_pieces(name, alone):
    losses, _ = run(train.step(mean_square, OPTIMIZERS[name], mode="data_parallel", **zero(2)), steps=4)
    np.testing.assert_allclose(losses, alone(OPTIMIZERS[name], 4, name), rtol=2e-4)


# ---- what XLA compiled


def compiled(loss=mean_square, **options):
    step = train.step(loss, optax.adamw(1e-2), **options)
    return step.lower(step.init(start, *data()), *data()).compile()


def collectives(executable):
    """How often each kind runs in a step, loops counted."""
    found = Counter()
    for one in read(executable).collectives:
        found[one.kind] += one.trips
    return dict(found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"all-reduce": 1}),
        ({"micro_batches": 4}, {"all-reduce": 1}),  # after the loop, whatever the number of micro-batches
        (zero(1), {"all-reduce": 1, "all-gather": 3}),
        (zero(2), {"reduce-scatter": 3, "all-reduce": 1, "all-gather": 3}),  # the all-reduce is the loss's
        (zero(3), {"all-gather": 3, "reduce-scatter": 3, "all-reduce": 1}),
    ],
    ids=["data", "micro-batches", "level 1", "level 2", "level 3"],
)
def test_collectives(options, expected):
    assert collectives(compiled(mode="data_parallel", **options)) == expected


def test_sums_in_pieces_are_reduced_in_the_loop():
    options = zero(2, gradient_accumulation_shard=True)
    found = collectives(compiled(mode="data_parallel", micro_batches=4, **options))
    assert found == {"reduce-scatter": 3 * 4, "all-reduce": 1, "all-gather": 3}


@pytest.mark.parametrize("options", [{}, {"micro_batches": 4}, zero(1), zero(2), zero(3)], ids=str)
def test_the_report_predicts_what_was_compiled(options):
    step = train.step(mean_square, optax.adamw(1e-2), mode="data_parallel", **options)
    state = step.init(start)
    made, found = step.plan(state, *data()), read(step.lower(state, *data()).compile())
    assert made.cost.bytes_sent == sum(c.bytes_sent * c.trips for c in found.collectives)


def held(state):
    """Bytes of the optimizer's state on one device."""
    leaves = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    return sum(x.addressable_shards[0].data.nbytes for x in leaves)


@pytest.mark.slow
def test_optimizer_memory_falls_by_the_number_of_devices():
    _, whole = run(train.step(mean_square, optax.adamw(1e-2), mode="data_parallel"), steps=1)
    _, pieces = run(train.step(mean_square, optax.adamw(1e-2), mode="data_parallel", **zero(1)), steps=1)
    _, groups = run(
        train.step(mean_square, optax.adamw(1e-2), mode="data_parallel", **zero(1, optimizer_weight_shard_size=2)),
        steps=1,
    )
    assert held(whole) == 8 * held(pieces) == 2 * held(groups)
    arguments = [
        compiled(mode="data_parallel", **o).memory_analysis().argument_size_in_bytes for o in ({}, zero(1), zero(3))
    ]
    params = 4 * (16 * 32 + 32 + 32 * 8)
    assert arguments[0] - arguments[1] == 2 * params * 7 // 8
    assert arguments[1] - arguments[2] == params * 7 // 8


def test_a_threshold_is_inclusive():
    step = train.step(mean_square, optax.adam(1e-2), mode="data_parallel", **zero(1, parallel_optimizer_threshold=2))
    _, state = run(step, steps=1)  # w1 has 2,048 bytes, w2 1,024
    assert state.opt_state[0].mu["w1"].sharding.spec[0] == "data"
    assert state.opt_state[0].mu["w2"].sharding.is_fully_replicated


def test_the_dtype_that_gradients_are_summed_in():
    def text(**options):
        def loss(params, x, y):
            return mean_square(params, x.astype("bfloat16"), y.astype("bfloat16")).astype(jnp.float32)

        step = train.step(loss, optax.adam(1e-2), mode="data_parallel", compute_dtype=jnp.bfloat16, **options)
        return step.lower(step.init(start), *data()).as_text()

    def sums(text):
        return set(re.findall(r"\}\) : \(tensor<16x32x(\w+)>\) -> tensor<16x32x\w+>", text))

    assert sums(text()) == {"f32"}
    assert sums(text(gradient_fp32_sync=False)) == {"bf16"}


# ---- what the options mean


def one_step(loss, **options):
    step = train.step(loss, optax.sgd(0.1), **options)
    state, value = step(step.init(start), *data())
    return float(value), np.asarray(state.params["w1"] - start()["w1"])


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_gradients_mean_and_loss_repeated_mean(mode):
    value, moved = one_step(mean_square, mode=mode)
    summed = one_step(mean_square, mode=mode, gradients_mean=False)
    assert summed[0] == pytest.approx(8 * value, rel=1e-5)
    np.testing.assert_allclose(summed[1], 8 * moved, rtol=1e-3, atol=1e-6)


def test_loss_repeated_mean_counts_the_devices_with_the_same_loss():
    options = {"mode": "semi_auto_parallel", **TENSOR}
    value, moved = one_step(mean_square, **options)
    again = one_step(mean_square, loss_repeated_mean=False, **options)
    assert again[0] == pytest.approx(value)
    np.testing.assert_allclose(again[1], 4 * moved, rtol=1e-3, atol=1e-6)


def normed(params, x, y):
    """A loss with a statistic of the batch."""
    hidden = x @ params["w1"]
    hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-3)
    return jnp.mean((hidden @ params["w2"] + params["b1"].sum() - y) ** 2)


def test_cross_batch_is_the_statistic_that_data_parallelism_computes():
    alone = one_step(normed, mode="stand_alone")[0]
    part = one_step(normed, mode="data_parallel")[0]
    assert one_step(normed, mode="semi_auto_parallel")[0] == pytest.approx(alone, rel=1e-5)
    assert one_step(normed, mode="semi_auto_parallel", cross_batch=True)[0] == pytest.approx(part, rel=1e-5)
    x, y = data()
    parts = [float(normed(start(), a, b)) for a, b in zip(np.split(x, 8), np.split(y, 8), strict=True)]
    assert part == pytest.approx(np.mean(parts), rel=1e-5) != pytest.approx(alone, rel=1e-3)


def test_layerwise_parameters_are_a_devices_own():
    step = train.step(mean_square, optax.sgd(0.1), mode="data_parallel", layerwise_parallel=("b*",))
    _, state = run(step, steps=1)
    own = state.params["b1"]
    assert own.shape == (8, 32)
    assert own.sharding.spec == P("data", None)
    x, y = data()
    gradient = jax.jit(jax.grad(mean_square))
    for i, (a, b) in enumerate(zip(np.split(x, 8), np.split(y, 8), strict=True)):
        grads = gradient(start(), a, b)
        np.testing.assert_allclose(own[i], -0.1 * grads["b1"], atol=1e-6)


def test_frozen_parameters_stay():
    step = train.step(mean_square, optax.adam(1e-2), mode="data_parallel", frozen=("w1",))
    before = np.asarray(step.init(start, *data()).params["w1"])
    _, state = run(step, steps=3)
    np.testing.assert_array_equal(state.params["w1"], before)
    assert state.opt_state[0].mu["w1"] is None


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "semi_auto_parallel"])
def test_auxiliary_output_is_that_of_the_whole_batch(mode):
    def loss(params, x, y):
        return mean_square(params, x, y), {"guess": x @ params["w1"], "norm": jnp.abs(x).mean()}

    for micro_batches in (1, 2):
        step = train.step(loss, optax.sgd(0.1), mode=mode, has_aux=True, micro_batches=micro_batches)
        _, (_, aux) = step(step.init(start), *data())
        np.testing.assert_allclose(aux["guess"], data()[0] @ start()["w1"], rtol=1e-4, atol=1e-5)
        assert float(aux["norm"]) == pytest.approx(float(jnp.abs(data()[0]).mean()), rel=1e-5)


def test_a_scalar_of_the_batch_goes_to_every_part():
    def loss(params, x, y, scale):
        return scale * mean_square(params, x, y)

    step = train.step(loss, optax.sgd(0.1), mode="data_parallel", micro_batches=2)
    _, value = step(step.init(start), *data(), jnp.float32(3))
    assert float(value) == pytest.approx(3 * one_step(mean_square, mode="stand_alone")[0], rel=1e-5)


def test_a_batch_by_name():
    x, y = data()
    step = train.step(mean_square, optax.sgd(0.1), mode="semi_auto_parallel", **TENSOR)
    state = step.init(start, y=y, x=x)
    by_name = [
        step(step.init(start, x, y), *some, **rest)[1] for some, rest in (((), {"y": y, "x": x}), ((x,), {"y": y}))
    ]
    assert float(by_name[0]) == float(by_name[1]) == one_step(mean_square, mode="semi_auto_parallel", **TENSOR)[0]
    assert step.plan(state, x, y=y) is step.plan(state, x, y)


def test_the_mode_and_the_settings_come_from_the_context():
    with auto_parallel(parallel_mode="data_parallel", enable_parallel_optimizer=True,
                       parallel_optimizer_config={"parallel_optimizer_threshold": 0}):  # fmt: skip
        step = train.step(mean_square, optax.adam(1e-2))
    _, state = run(step, steps=1)
    assert "data_parallel" in repr(step)
    assert not state.opt_state[0].mu["w1"].sharding.is_fully_replicated
    assert "auto_parallel" in repr(train.step(mean_square, optax.adam(1e-2)))


def test_the_state_is_donated_and_kept_where_asked():
    for donate in (True, False):
        step = train.step(mean_square, optax.adam(1e-2), mode="data_parallel", donate=donate)
        state = step.init(start)
        step(state, *data())
        assert state.params["w1"].is_deleted() is donate


def test_a_bare_array_and_an_empty_one():
    x, y = data()
    step = train.step(lambda w, x, y: jnp.mean((x @ w - y) ** 2), optax.adam(0.1), mode="data_parallel")
    _, value = step(step.init(jnp.ones((16, 8))), x, y)
    assert float(value) == pytest.approx(float(jnp.mean((x @ jnp.ones((16, 8)) - y) ** 2)), rel=1e-5)
    step = train.step(
        lambda p, x, y: mean_square(p, x, y) + p["none"].sum(), optax.adam(0.1), mode="data_parallel", **zero(3)
    )
    _, value = step(step.init({**start(), "none": jnp.zeros((0, 3))}), x, y)
    assert float(value) == pytest.approx(float(mean_square(start(), x, y)), rel=1e-5)


def test_another_model_of_the_same_structure():
    step = train.step(lambda w, x: jnp.mean((x @ w) ** 2), optax.adam(0.1), mode="data_parallel", **zero(3))
    for width in (24, 7):
        state, _ = step(step.init(jnp.ones((16, width))), data()[0])
        assert state.params.shape == (16, width)


def test_another_batch_size_keeps_the_layout():
    step = train.step(mean_square, optax.adam(1e-2), mode="semi_auto_parallel", **TENSOR)
    state, _ = step(step.init(start, *data()), *data())
    before = state.params["w1"].sharding
    state, _ = step(state, *data(16))
    assert state.params["w1"].sharding.is_equivalent_to(before, 2)


def test_a_plan_and_a_report_for_a_pod_that_is_not_here():
    step = train.step(mean_square, optax.adam(1e-2), mode="data_parallel", device="tpu-v5e:4x4", **zero(2))
    shapes = jax.eval_shape(lambda: train.TrainState(start(), optax.adam(1e-2).init(start()), jnp.int32(0)))
    batch = jax.eval_shape(data)
    made = step.plan(shapes, *batch)
    assert made.decision("state/opt_state/0/mu/w1").strategy == (16, 1)
    assert [c.kind for c in estimate.collectives(made.partitioned)].count("reduce-scatter") == 3


# ---- what is wrong


def counted(params, x, y):
    return mean_square(params, x, y), {"positive": (x > 0).sum()}


def crossed(params, x, y):
    return mean_square(params, x, y), x @ x.T


def named(loss=mean_square, **batch):
    step = train.step(loss, optax.sgd(1), mode="data_parallel")
    return step(step.init(start), data()[0], **batch)


WRONG = [
    (lambda: one_step(mean_square, mode="data_parallel", frozen="nope"), StrategyError, "frozen 'nope' matches no parameter"),
    (lambda: run(train.step(counted, optax.sgd(1), has_aux=True, mode="data_parallel")), StrategyError, "no mean"),
    (lambda: run(train.step(counted, optax.sgd(1), has_aux=True, mode="stand_alone", micro_batches=2)), StrategyError, "`positive`"),
    (lambda: run(train.step(crossed, optax.sgd(1), has_aux=True, mode="data_parallel")), StrategyError, "several dims"),
    (lambda: run(train.step(mean_square, optax.sgd(1), has_aux=True)), StrategyError, "no pair"),
    (lambda: run(train.step(counted, optax.sgd(1))), StrategyError, "set has_aux=True"),
    (lambda: run(train.step(lambda p, x, y: x @ p["w1"], optax.sgd(1))), StrategyError, "no floating-point scalar"),
    (lambda: train.step(mean_square, optax.sgd(1))({"w1": 1}, *data()), StrategyTypeError, "call init(params) first"),
    (lambda: train.step(3, 4, micro_batches=0), StrategyError, "3 problems"),
    (lambda: train.step(mean_square, optax.sgd(1), mode="dp"), ContextError, 'mode="data_parallel"'),
    (lambda: train.step(mean_square, optax.sgd(1), nonsense=1), StrategyTypeError, "no option `nonsense`"),
    (lambda: train.step(mean_square, optax.sgd(1), level=7, search_mode="no"), StrategyError, "2 problems:\n1. `level` is 7"),
    (lambda: named(z=1), StrategyTypeError, "missing a required argument: 'y'"),
    (lambda: named(x=1, y=2), StrategyTypeError, "multiple values for argument 'x'"),
    (lambda: named(lambda params, x, *, y: x, y=1), StrategyTypeError, "is given by name, but has no position"),
    (lambda: train.step(train.pipeline(mean_square, 2), optax.sgd(1), recompute=1, mutable="a"), StrategyError, "2 problems:"),
    (lambda: train.step(mean_square, optax.sgd(1), parallel_optimizer_config={"foo": 1}), ContextError, "no entry 'foo'"),
    (lambda: train.step(mean_square, optax.sgd(1), mode="data_parallel", in_strategy=((8, 1), None)), StrategyError, "no meaning"),
    (lambda: train.step(mean_square, optax.sgd(1), mode="data_parallel", memory_limit="64B", compile_candidates=2), StrategyError,
     "`memory_limit` has no meaning in mode 'data_parallel'"),
    (lambda: train.step(mean_square, optax.sgd(1), mode="auto_parallel", layerwise_parallel=("b1",)), StrategyError, "no meaning"),
    (lambda: one_step(mean_square, mode="data_parallel", layerwise_parallel=("q",)), StrategyError, "matches no parameter"),
    (lambda: run(train.step(mean_square, optax.sgd(1), mode="data_parallel"), batch=data(30)), StrategyError, "batch of 24"),
    (lambda: run(train.step(mean_square, optax.sgd(1), mode="data_parallel", micro_batches=3)), StrategyError, "3 micro-batches"),
    (lambda: run(train.step(mean_square, optax.sgd(1), mode="semi_auto_parallel", in_strategy=((2, 1),))), StrategyError, "2 entries"),
    (lambda: run(train.step(mean_square, optax.sgd(1), mode="semi_auto_parallel", parameter_plan={"q": (1,)})), ShardError, "no array"),
    (lambda: run(train.step(mean_square, optax.sgd(1), parameter_plan={"x": (2, 1)})), StrategyError,
     "write in_strategy=((2, 1), (2, 1))"),
    (lambda: run(train.step(mean_square, optax.sgd(1), parameter_plan={"batch/1": (4, 1)})), StrategyError,
     "`parameter_plan` names `batch/1`, which is of the batch"),
    (lambda: run(train.step(mean_square, optax.sgd(1), mode="data_parallel", **zero(1, optimizer_weight_shard_size=3))), StrategyError, "use one of 2, 4, 8"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_errors_say_what_to_do(call, kind, text):
    with pytest.raises(kind, match=re.escape(text)) as caught:
        call()
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_the_users_compiler_options_go_beside_those_of_fusion(mode):
    heard = {"xla_cpu_enable_fast_math": True}
    step = train.step(
        mean_square, optax.sgd(1e-2), mode=mode, comm_fusion={"allreduce": {"mode": "auto"}}, compiler_options=heard
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(step)
        with pytest.raises(Exception, match="nonsense"):
            run(train.step(mean_square, optax.sgd(1e-2), mode=mode, compiler_options={"nonsense": 1}))


@pytest.mark.parametrize("mode", [pytest.param("semi_auto_parallel", marks=pytest.mark.slow), "auto_parallel"])
def test_a_layout_file_lays_out_what_is_not_named(mode, tmp_path):
    step = train.step(mean_square, optax.adam(1e-2), mode="semi_auto_parallel", **TENSOR)
    made = step.plan(step.init(start), *data())
    made.save(tmp_path / "step.toml")
    for layout in (tmp_path / "step.toml", made):
        again = train.step(mean_square, optax.adam(1e-2), mode=mode, layout=layout)
        assert again.plan(again.init(start), *data()).decision("state/params/w1").strategy == (1, 4)
    with auto_parallel(parallel_mode=mode, strategy_ckpt_load_file=str(tmp_path / "step.toml")):
        again = train.step(mean_square, optax.adam(1e-2))
    assert again.init(start, *data()).opt_state[0].mu["w2"].sharding.shard_shape((32, 8)) == (8, 8)
    with pytest.raises(StrategyError, match="no meaning in mode 'data_parallel'"):
        train.step(mean_square, optax.adam(1e-2), mode="data_parallel", layout=made)


def test_a_strategy_file_of_parameters_leaves_the_batch_to_the_mode(tmp_path):
    step = train.step(mean_square, optax.adam(1e-2), mode="semi_auto_parallel", **TENSOR)
    made = step.plan(step.init(start), *data())
    made.save(tmp_path / "all.json")
    rows = json.loads((tmp_path / "all.json").read_text())
    layouts = rows["parallel_layout_item"]
    rows["parallel_layout_item"] = {name: row for name, row in layouts.items() if not name.startswith("batch")}
    (tmp_path / "parameters.json").write_text(json.dumps(rows))
    for file, batch in (("all.json", (2, 1)), ("parameters.json", (8, 1))):
        with auto_parallel(
            parallel_mode="semi_auto_parallel", strategy_ckpt_config={"load_file": str(tmp_path / file)}
        ):
            again = train.step(mean_square, optax.adam(1e-2))
            found = again.plan(again.init(start), *data())
        assert found.decision("state/params/w1").strategy == (1, 4)
        assert found.decision("batch/0").strategy == batch


def test_globs_are_those_of_shard():
    """`.` separates as `/` does, a path goes before a glob, and two globs that clash are an error."""
    options = {"mode": "semi_auto_parallel", "in_strategy": ((2, 1), (2, 1))}
    for plan in ({"w1": (1, 4), "w*": (1, 2)}, {"w*": (1, 2), "w1": (1, 4)}):
        step = train.step(mean_square, optax.adam(1e-2), parameter_plan=plan, **options)
        assert step.plan(step.init(start), *data()).decision("state/params/w1").strategy == (1, 4)
    with pytest.raises(StrategyError, match="two entries of `parameter_plan` match `w1`"):
        clash = train.step(mean_square, optax.adam(1e-2), parameter_plan={"w*": (1, 2), "*1": (1, 4)}, **options)
        clash.plan(clash.init(start), *data())
    nested = {"layers": [start()]}
    step = train.step(
        lambda p, x, y: mean_square(p["layers"][0], x, y), optax.adam(1), mode="data_parallel", frozen="layers.0.w1"
    )
    assert step.init(lambda: nested).opt_state[0].mu["layers"][0]["w1"] is None


@pytest.mark.slow
def test_step_in_semi_auto_mode_stores_parameters_as_operators_read_them():
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = {"w1": (16, 32), "b1": (32,), "w2": (32, 16), "b2": (16,)}
    weights = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
    x, y = jax.random.normal(keys[4], (16, 16)), jax.random.normal(keys[5], (16, 16))

    def loss(first, second, p, x, y):
        return jnp.mean((second(jax.nn.relu(first(x, p["w1"]) + p["b1"]), p["w2"]) + p["b2"] - y) ** 2)

    product, transposed = shardfn.shard(jnp.matmul, ((2, 1), (1, 4))), lambda h, w: product(h, w.T.T)
    seeded, plain = functools.partial(loss, product, transposed), functools.partial(loss, jnp.matmul, jnp.matmul)
    step = train.step(seeded, optax.adam(1e-2), mode="semi_auto_parallel", compute_dtype=jnp.float32)
    alone = train.step(plain, optax.adam(1e-2), mode="stand_alone")
    state, other = step.init(weights, x, y), alone.init(weights, x, y)
    for kept in (state.params, state.opt_state[0].mu):
        found = {name: tuple(n // m for n, m in zip(v.shape, v.sharding.shard_shape(v.shape), strict=True))
                 for name, v in kept.items()}  # fmt: skip
        assert found == {"w1": (1, 4), "b1": (1,), "w2": (1, 4), "b2": (1,)}
    for _ in range(3):
        (state, value), (other, expected) = step(state, x, y), alone(other, x, y)
        np.testing.assert_allclose(value, expected, rtol=1e-4)


CLOSED_OVER = {
    "data_parallel": {"mode": "data_parallel"},
    "semi-auto": {"mode": "semi_auto_parallel"},
    "optimizer parallel": {
        "mode": "semi_auto_parallel",
        "parallel_optimizer_config": {"parallel_optimizer_threshold": 0},
    },
    "micro-batches": {"mode": "semi_auto_parallel", "micro_batches": 2},
}


@pytest.mark.parametrize("name", CLOSED_OVER)
def test_arrays_that_the_loss_closes_over_are_arguments_of_a_step_in_every_mode(name):
    fixed = jnp.ones((8, 8)) / 8
    params, x, y = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}, jnp.ones((16, 8)), jnp.zeros((16, 4))

    def closing(params, x, y):
        return jnp.mean((x @ fixed @ params["w"] + params["b"] - y) ** 2)

    losses = []
    for how in "constant", "argument":
        step = train.step(closing, optax.sgd(0.1), closed_over=how, donate=False, **CLOSED_OVER[name])
        state = step.init(params, x, y)
        found = [d.path for d in step.plan(state, x, y).inputs if d.path.startswith("closed_over")]
        assert found == (["closed_over/fixed"] if how == "argument" else [])
        losses.append([float(step(step(state, x, y)[0], x, y)[1])])
    np.testing.assert_allclose(*losses, rtol=1e-6)

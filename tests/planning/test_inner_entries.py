"""Entries of sharded functions, `reshard` and tags inside a function: they seed the outer call's mesh, propagation and search."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardfn
import shardfn.mindspore as ms
from shardfn import AUTO, reshard, shard, train
from shardfn.errors import StrategyError
from tests.marks import some_slow

RNG = np.random.default_rng(0)
ARRAYS = tuple(jnp.asarray(RNG.normal(size=s), jnp.float32) for s in [(64, 64), (64, 64), (64,), (64, 64), (64,)])
product = shard(jnp.matmul, ((2, 1), (1, 4)))


def ffn(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, first: Any = jnp.matmul) -> Any:
    return jax.nn.relu(first(x, w1) + b1) @ w2 + b2


seeded = functools.partial(ffn, first=product)


class MatMul(ms.Cell):
    def construct(self, x: Any, w: Any) -> Any:
        return x @ w


class FeedForward(ms.Cell):
    def __init__(self) -> None:
        self.w1, self.b1, self.w2, self.b2 = ARRAYS[1:]
        self.first = MatMul().shard(((2, 1), (1, 4)))

    def construct(self, x: Any) -> Any:
        return ffn(x, self.w1, self.b1, self.w2, self.b2, self.first)


def strategies(plan: shardfn.Plan) -> dict[str, tuple[int, ...]]:
    return {d.path: d.strategy for d in (*plan.inputs, *plan.outputs)}


def of_ops(plan: shardfn.Plan, *kinds: str) -> list[tuple[tuple[int, ...], ...]]:
    return [s for name, s in ms.get_strategy(plan).items() if name.partition("-")[0] in kinds]


def on_mesh(*spec: str | None) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    return NamedSharding(mesh, PartitionSpec(*spec))


def check(function: Any, plain: Any, *arrays: Any, **options: Any) -> shardfn.Plan:
    """The plan of a call, after comparing its value and gradient with the unsharded ones."""
    sharded: Any = shard(function, **options)
    np.testing.assert_allclose(sharded(*arrays), jax.jit(plain)(*arrays), rtol=1e-3, atol=1e-3)
    own, expected = (jax.grad(lambda *a, f=f: jnp.mean(f(*a) ** 2))(*arrays) for f in (sharded, jax.jit(plain)))
    np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-3)
    return sharded.plan(*arrays)


def is_ffn_of_mindspore(plan: shardfn.Plan) -> bool:
    """Add ((2, 4), (4,)), ReLU (2, 4), MatMul ((2, 4), (4, 1)): the outcome of MindSpore's own page."""
    made = strategies(plan)
    return (
        of_ops(plan, "dot_general") == [((2, 1), (1, 4)), ((2, 4), (4, 1))]
        and of_ops(plan, "add")[0] == of_ops(plan, "maximum")[0] == ((2, 4), (2, 4))
        and [made[name] for name in made if name.endswith(("w1", "b1", "w2", "b2"))] == [(1, 4), (4,), (4, 1), (1,)]
    )


def test_operator_with_strategy_seeds_propagation() -> None:
    plan = check(seeded, ffn, *ARRAYS, search_mode="sharding_propagation")
    assert plan.axes == (("a", 2), ("b", 4))
    assert is_ffn_of_mindspore(plan)
    assert strategies(plan)["x"] == (2, 1)
    assert all("test_inner_entries.py:" in c.where for c in plan.collectives)


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_operator_of_cell_seeds_propagation_in_mindspores_modes(mode: str) -> None:
    with ms.auto_parallel(device_num=8, parallel_mode=mode, search_mode="sharding_propagation"):
        network = FeedForward().shard()
        plan = network.plan(ARRAYS[0])
        found = {name: strategies(plan)[name] for name in ("w1", "b1", "w2", "b2")}
        assert found == {"w1": (1, 4), "b1": (4,), "w2": (4, 1), "b2": (1,)}
        assert of_ops(plan, "dot_general") == [((2, 1), (1, 4)), ((2, 4), (4, 1))]
        np.testing.assert_allclose(network(ARRAYS[0]), ffn(*ARRAYS), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["auto", "dynamic_programming", "recursive_programming"])
def test_operator_with_strategy_is_kept_by_each_search(mode: str) -> None:
    plan = check(seeded, ffn, *ARRAYS, search_mode=mode)
    assert of_ops(plan, "dot_general")[0] == ((2, 1), (1, 4))
    assert strategies(plan)["w1"] == (1, 4)


SEEDS = [((2, 4), (4, 1)), ((2, 1), (1, 1)), ((1, 2), (2, 2))]
ROWS_8 = {"in_strategy": ((8, 1), (1, 1), (1,), (1, 1), (1,))}
COLUMNS_8 = {"in_strategy": ((1, 1), (1, 8), (8,), (8, 1), (1,))}
SEARCHES: list[dict[str, Any]] = [
    *({"search_mode": mode} for mode in ("auto", "dynamic_programming", "recursive_programming", "sharding_propagation")),
    *({"style": style} for style in ("data_parallel", "fsdp", "tensor_parallel", "fsdp_tensor_parallel")),
    ROWS_8, COLUMNS_8, ROWS_8 | {"search_mode": "sharding_propagation"},
]  # fmt: skip


LEVELS = ["communication", "memory", "time"]
LONG = {"search_mode": "auto"}, SEEDS[2]
EVERY_PLAN = [  # quick: each pair once, but for this option with this seed
    pytest.param(options, level, seed, marks=[] if (i + j + k) % 3 == 0 and (options, seed) != LONG else pytest.mark.slow)
    for i, options in enumerate(SEARCHES) for j, level in enumerate(LEVELS) for k, seed in enumerate(SEEDS)
]  # fmt: skip


@pytest.mark.parametrize(("options", "level", "seed"), EVERY_PLAN, ids=str)
def test_operator_reads_its_operands_as_its_strategy_in_every_plan(options: Any, level: str, seed: Any) -> None:
    first = shard(jnp.matmul, seed)
    plan = shard(functools.partial(ffn, first=first), level=level, **options).plan(*ARRAYS)
    assert of_ops(plan, "dot_general")[0] == seed


@pytest.mark.parametrize("seed", some_slow(SEEDS, [SEEDS[2]]))
def test_operator_kept_by_a_constraint_computes_the_same(seed: Any) -> None:
    first = shard(jnp.matmul, seed)
    plan = check(functools.partial(ffn, first=first), ffn, *ARRAYS, level="memory")
    assert of_ops(plan, "dot_general")[0] == seed


OTHER_FORMS = {
    "cast": (lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), False),
    "cast and transposed": (lambda x, w: x.astype(jnp.bfloat16) @ w.T, True),
    "reshaped": (lambda x, w: (x.reshape(8, 8, 64) @ w).reshape(64, 64), False),
}


EVERY_FORM = [  # as above
    pytest.param(options, form, level, seed, marks=[] if (i + j + k) % 3 == 0 and (options, seed) != LONG else pytest.mark.slow)
    for options in ({"search_mode": "auto"}, ROWS_8)
    for i, form in enumerate(OTHER_FORMS) for j, level in enumerate(LEVELS) for k, seed in enumerate(SEEDS)
]  # fmt: skip


@pytest.mark.parametrize(("options", "form", "level", "seed"), EVERY_FORM, ids=str)
def test_operator_reads_its_cast_or_transposed_operands_as_its_strategy(
    options: Any, form: str, level: str, seed: Any
) -> None:
    (function, is_turned), (rows, columns) = OTHER_FORMS[form], seed
    first = shard(function, (rows, columns[::-1] if is_turned else columns))
    plan = shard(functools.partial(ffn, first=first), level=level, **options).plan(*ARRAYS)
    expected = ((rows[0], 1, rows[1]) if form == "reshaped" else rows), columns
    assert of_ops(plan, "dot_general")[0] == expected


def test_cast_operator_kept_by_a_constraint_computes_the_same() -> None:
    function = OTHER_FORMS["cast and transposed"][0]
    first = shard(function, ((2, 1), (1, 1)))
    plan = shard(functools.partial(ffn, first=first)).plan(*ARRAYS)
    assert of_ops(plan, "dot_general")[0] == ((2, 1), (1, 1))
    value = shard(functools.partial(ffn, first=first))(*ARRAYS)
    np.testing.assert_allclose(value, ffn(*ARRAYS, first=function), rtol=0.02, atol=0.02)


def test_operator_that_divides_a_sharded_dimension_computes_the_same() -> None:
    inner = shard(lambda x, w: x.reshape(2, 32, 64) @ w, ((8, 1), (1, 1)))  # 8 shards of 64 are 2 x 4 of 2 x 32
    check(lambda x, w: jnp.tanh(inner(x, w)), lambda x, w: jnp.tanh(x.reshape(2, 32, 64) @ w), *ARRAYS[:2])


def test_operator_with_two_operands_along_one_axis_computes_the_same() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    inner = shard(jnp.matmul, (PartitionSpec("data"), PartitionSpec(None, "data")), device=mesh)
    check(lambda x, w: jnp.tanh(inner(x, w)), lambda x, w: jnp.tanh(x @ w), *ARRAYS[:2], device=mesh)


def test_contracted_dimension_of_operator_leaves_a_sum() -> None:
    plan = check(lambda x, w: jnp.sin(shard(jnp.matmul, ((2, 4), (4, 1)))(x, w)), lambda x, w: jnp.sin(x @ w),
                 *ARRAYS[:2], search_mode="sharding_propagation")  # fmt: skip
    assert of_ops(plan, "dot_general") == [((2, 4), (4, 1))]
    assert {c.kind for c in plan.collectives} <= {"all-reduce", "reduce-scatter"}


def test_results_of_operator_are_sharded_as_its_out_strategy() -> None:
    inner = shard(jnp.matmul, out_strategy=((2, 4),))
    plan = check(lambda x, w: jnp.sin(inner(x, w)), lambda x, w: jnp.sin(x @ w), *ARRAYS[:2],
                 search_mode="sharding_propagation")  # fmt: skip
    assert strategies(plan) == {"x": (2, 1), "w": (1, 4), "result": (2, 4)}


def test_dimension_left_open_inside_follows() -> None:
    inner = shard(jnp.matmul, ((2, AUTO), AUTO))
    plan = check(lambda x, w: jnp.sin(inner(x, w)), lambda x, w: jnp.sin(x @ w), *ARRAYS[:2])
    assert of_ops(plan, "dot_general")[0][0][0] == 2


def block(x: Any, w1: Any, w2: Any) -> Any:
    return x + jax.nn.relu(x @ w1) @ w2


def test_blocks_inside_share_the_mesh_of_the_call() -> None:
    data = shard(block, ((8, 1), (1, 1), (1, 1)))
    tensor = shard(block, ((2, 1), (1, 4), (4, 1)), ((2, 1),))
    arrays = (ARRAYS[0], ARRAYS[1], ARRAYS[3], ARRAYS[1], ARRAYS[3])
    plan = check(lambda x, a, b, c, d: tensor(data(x, a, b), c, d), lambda x, a, b, c, d: block(block(x, a, b), c, d),
                 *arrays)  # fmt: skip
    assert plan.axes == (("a", 2), ("b", 4))
    assert list(strategies(plan).values())[:5] == [(8, 1), (1, 1), (1, 1), (1, 4), (4, 1)]


def test_reshard_inside_seeds_propagation() -> None:
    def function(x: Any, w1: Any, w2: Any) -> Any:
        return jax.nn.relu(shardfn.reshard(x @ w1, on_mesh("data", "model"))) @ w2

    arrays = (ARRAYS[0], ARRAYS[1], ARRAYS[3])
    plan = check(function, lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2, *arrays, search_mode="sharding_propagation")
    assert plan.axes == (("data", 2), ("model", 4))
    assert list(strategies(plan).values()) == [(2, 1), (1, 4), (4, 1), (2, 1)]


def test_reshard_to_a_layout_beside_integers_is_on_the_mesh_of_the_call() -> None:
    layout = ms.Layout((2, 4), ("dp", "mp"))("dp", "mp")
    plan = check(lambda x, w: ms.reshard(x @ w, layout), jnp.matmul, *ARRAYS[:2], in_strategy=((8, 1), AUTO))
    assert plan.inputs[0].strategy == (8, 1)
    assert dict(plan.mesh.shape) == {"x0": 2, "x1": 2, "x2": 2}


def test_tag_with_a_sharding_seeds_propagation(tmp_path: Any) -> None:
    path = tmp_path / "layout.toml"
    path.write_text(
        'format = "shardfn-layout"\nversion = 2\n[mesh]\ndata = 2\nmodel = 4\n[activations]\n"h" = ["data", "model"]\n'
    )

    def function(x: Any, w1: Any, w2: Any) -> Any:
        return jax.nn.relu(shardfn.tag(x @ w1, "h")) @ w2

    arrays = (ARRAYS[0], ARRAYS[1], ARRAYS[3])
    plan = check(function, lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2, *arrays, layout=path,
                 search_mode="sharding_propagation")  # fmt: skip
    assert list(strategies(plan).values())[:3] == [(2, 1), (1, 4), (4, 1)]


def test_operator_in_a_call_with_named_shardings_takes_their_axes() -> None:
    plan = check(seeded, ffn, *ARRAYS, in_strategy=(on_mesh("data"), AUTO, AUTO, AUTO, AUTO))
    assert plan.axes == (("data", 2), ("model", 4))
    assert plan.decision("w1").spec == ((), ("model",))


@pytest.mark.parametrize("transformed", [
    lambda f: lambda x, w: jax.vmap(f, in_axes=(1, None))(jnp.stack([x, 2 * x], 1), w),
    lambda f: lambda x, w: jax.lax.scan(lambda c, _: (jnp.tanh(f(c, w)), None), x, length=3)[0],
    lambda f: jax.checkpoint(lambda x, w: jnp.tanh(f(x, w))),
    lambda f: jax.jit(lambda x, w: f(f(x, w), w)),
    lambda f: jax.grad(lambda x, w: jnp.mean(f(x, w) ** 2)),
], ids=["vmap", "scan", "checkpoint", "jit", "grad"])  # fmt: skip
def test_operator_under_a_transformation_keeps_its_strategy(transformed: Any) -> None:
    plan = check(transformed(product), transformed(jnp.matmul), *ARRAYS[:2])
    assert strategies(plan)["w"] == (1, 4)


def test_wrong_strategy_inside_is_an_error_of_the_function_inside() -> None:
    inner = shard(jnp.matmul, ((3, 1), (1, 1)))
    with pytest.raises(StrategyError, match=r"in_strategy\[0\] = \(3, 1\)"):
        shard(lambda x, w: inner(x, w)).plan(*ARRAYS[:2])


def test_other_devices_inside_are_an_error() -> None:
    inner = shard(jnp.matmul, ((2, 1), (1, 1)), device=jax.devices()[:4])
    with pytest.raises(StrategyError, match="sharded for 4 devices, inside a call for 8"):
        shard(lambda x, w: inner(x, w)).plan(*ARRAYS[:2])


def test_mesh_inside_that_does_not_fit_is_an_error() -> None:
    permuted = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("data", "model"))
    wanted = NamedSharding(permuted, PartitionSpec("data"))
    with pytest.raises(StrategyError, match="does not fit the mesh of the call") as error:
        shard(lambda x: shardfn.reshard(jnp.sin(x), wanted), ((8, 1),)).plan(ARRAYS[0])
    assert "test_inner_entries.py" in str(error.value)


def test_plan_of_another_size_has_the_strategy_inside() -> None:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARRAYS]
    plan = shardfn.plan(seeded, *shapes, device="tpu-v5e:4x4", search_mode="sharding_propagation")
    assert [d.strategy for d in plan.inputs[:2]] == [(2, 1), (1, 4)]


def test_saved_plan_with_a_strategy_inside_is_the_same_plan(tmp_path: Any) -> None:
    plan = shard(seeded, search_mode="sharding_propagation").plan(*ARRAYS)
    plan.save(tmp_path / "plan.toml")
    again = shard(seeded, layout=tmp_path / "plan.toml")
    assert strategies(again.plan(*ARRAYS)) == strategies(plan)
    np.testing.assert_allclose(again(*ARRAYS), ffn(*ARRAYS), rtol=1e-3, atol=1e-3)


# ---- a PartitionSpec in `reshard`


def over_mesh(x, w):
    return jnp.tanh(reshard(x @ w, PartitionSpec("dp", "tp"))) * 2.0


def auto_mesh():
    return jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("entries", [None, ((8, 1), (1, 1)), (PartitionSpec("dp"), PartitionSpec(None, "tp"))])
def test_reshard_to_a_partition_spec_uses_the_mesh_of_the_call(entries):
    x, w = jnp.arange(16.0 * 32).reshape(16, 32) / 512, jnp.ones((32, 64)) / 32
    f = shard(over_mesh, entries, device=auto_mesh())
    expected = np.tanh(np.asarray(x @ w)) * 2
    assert f(x, w).sharding.shard_shape((16, 64)) == (8, 16)
    np.testing.assert_allclose(f(x, w), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(f, (0, None)))(x[None], w)[0], expected, rtol=1e-5)
    grads = jax.grad(lambda x: f(x, w).sum())(x), jax.grad(lambda x: (jnp.tanh(x @ w) * 2.0).sum())(x)
    np.testing.assert_allclose(*grads, rtol=1e-4)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_reshard_to_a_partition_spec_uses_the_set_mesh(kind):
    with jax.set_mesh(jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)):
        x, w = jnp.ones((16, 32)), jnp.ones((32, 64))
        assert reshard(x, PartitionSpec("dp", "tp")).sharding.shard_shape(x.shape) == (8, 8)
        assert jax.jit(lambda x: reshard(x, PartitionSpec(None, "tp")))(x).sharding.shard_shape(x.shape) == (16, 8)
        assert shard(over_mesh)(x, w).sharding.shard_shape((16, 64)) == (8, 16)


def test_reshard_to_a_partition_spec_without_its_mesh_or_axes_says_how():
    x = jnp.ones((16, 32))
    with pytest.raises(StrategyError, match=r"no mesh around(.|\n)*NamedSharding\(mesh, P\('dp', 'tp'\)\)"):
        shard(lambda x: reshard(x, PartitionSpec("dp", "tp")))(x)
    for spec, says in (
        (PartitionSpec("rows"), "rows"),
        (PartitionSpec("dp", "dp"), "dp"),
        (PartitionSpec("dp", None, "tp"), "rank|ndim|only valid"),
    ):
        with pytest.raises(
            StrategyError, match=rf"does not fit the array(.|\n)*the mesh dp=2 x tp=4(.|\n)*why: .*({says})"
        ):
            shard(lambda x, spec=spec: reshard(x, spec), device=auto_mesh())(x)


def named_entries(kind: str) -> tuple[tuple[Any, Any], dict[str, Any], dict[str, Any]]:
    """Entries of a matmul whose weights are sharded 4 ways along dimension 1, its options, and those around it."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    specs = PartitionSpec("data", None), PartitionSpec(None, "model")
    layout = ms.Layout((2, 4), ("data", "model"))
    return {
        "integers": (((2, 1), (1, 4)), {}, {}),
        "layouts": ((layout("data", "None"), layout("None", "model")), {}, {}),
        "named shardings": (tuple(NamedSharding(mesh, spec) for spec in specs), {}, {}),
        "specs on a mesh": (specs, {"device": mesh}, {}),
        "specs on the mesh around": (specs, {}, {"device": mesh}),
    }[kind]


@pytest.mark.parametrize("turned", [False, True], ids=["read as stored", "read transposed"])
@pytest.mark.parametrize(
    "kind", ["integers", "layouts", "named shardings", "specs on a mesh", "specs on the mesh around"]
)
def test_step_stores_a_weight_as_its_operator_reads_it(kind: str, turned: bool) -> None:
    entries, own, around = named_entries(kind)
    product = shard(jnp.matmul, entries, **own)

    def loss(params: Any, x: Any, first: Any = product) -> Any:
        return jnp.mean(first(x, params["w"].T if turned else params["w"]) ** 2) + jnp.sum(params["b"] ** 2)

    params, x = {"w": jnp.ones((64, 64)), "b": jnp.ones(3)}, ARRAYS[0]
    step = train.step(loss, optax.adam(0.1), mode="semi_auto_parallel", **around)
    state = step.init(params, x)
    expected = (4, 1) if turned else (1, 4)
    assert {d.strategy for d in step.plan(state, x).inputs if d.path.endswith("/w")} == {expected}
    state, value = step(state, x)
    assert state.params["w"].sharding.shard_shape((64, 64)) == (64 // expected[0], 64 // expected[1])
    np.testing.assert_allclose(value, loss(params, x, jnp.matmul), rtol=1e-4)


INDEXED = {
    "unrolled": lambda w, x, f: f(f(x, w[0]), w[1]),
    "from the end": lambda w, x, f: f(f(x, w[-2]), w[-1]),
    "in a loop": lambda w, x, f: jax.lax.fori_loop(0, 2, lambda i, h: f(h, w[i]), x),
    "scanned": lambda w, x, f: jax.lax.scan(lambda h, one: (f(h, one), None), x, w)[0],
    "by a scanned index": lambda w, x, f: jax.lax.scan(lambda h, i: (f(h, w[i]), None), x, jnp.arange(2))[0],
    "cast": lambda w, x, f: f(f(x, w.astype(jnp.bfloat16)[0]), w[1]),
    "transposed": lambda w, x, f: f(f(x, w[0].T), w[1].T),
}


@pytest.mark.parametrize("form", INDEXED)
def test_step_stores_a_stack_as_an_operator_reads_what_is_indexed(form: str) -> None:
    def loss(params: Any, x: Any, first: Any = product) -> Any:
        return jnp.mean(INDEXED[form](params["w"], x, first) ** 2)

    params, x = {"w": jnp.asarray(RNG.normal(size=(2, 64, 64)) / 8, jnp.float32)}, ARRAYS[0]
    step = train.step(loss, optax.adam(0.1), mode="semi_auto_parallel")
    state = step.init(params, x)
    shard_shape = (2, 16, 64) if form == "transposed" else (2, 64, 16)
    assert state.params["w"].sharding.shard_shape((2, 64, 64)) == shard_shape
    state, value = step(state, x)
    assert state.params["w"].sharding.shard_shape((2, 64, 64)) == shard_shape
    np.testing.assert_allclose(value, loss(params, x, jnp.matmul), rtol=2e-2)


def test_spec_inside_without_a_mesh_is_refused() -> None:
    inner = shard(jnp.matmul, (PartitionSpec("data", None), PartitionSpec(None, "model")))
    with pytest.raises(StrategyError, match="has a PartitionSpec, but there is no mesh"):
        shard(lambda x, w: inner(x, w))(*ARRAYS[:2])


@pytest.mark.parametrize("is_planned_first", [False, True])
def test_body_of_a_loop_is_traced_anew_in_an_outer_call(is_planned_first):
    # JAX keeps the trace of a body by its function, which is the same inside an outer call and outside.
    def neighbours(u):
        return u.at[2:-1].add(jnp.tanh(u[:-3])).at[0].set(u[-1])

    inner = shardfn.shard(neighbours, ((2,),))

    def body(u, _):
        return inner(u), None

    def steps(u):
        return jax.lax.scan(body, u, None, 2)[0]

    def gradient(function):
        return jax.grad(lambda u: (function(u) * jnp.arange(24.0)).sum())

    u = jnp.sin(1 + jnp.arange(24.0))
    expected = gradient(lambda u: neighbours(neighbours(u)))(u)
    runs = [jax.jit(gradient(steps)), gradient(shardfn.shard(steps, ((8,),)))]
    for run in reversed(runs) if is_planned_first else runs:
        np.testing.assert_allclose(run(u), expected, rtol=1e-5)


@pytest.mark.parametrize("strategy", [(1, 1, 4), (2, 1, 2)])
@pytest.mark.parametrize("outer", [((1, 1, 1),), None])
def test_convolution_inside_reads_a_halo_along_its_given_sharding(strategy, outer):
    kernel = jnp.asarray(RNG.normal(size=(2, 4, 3)), jnp.float32)
    x = jnp.asarray(RNG.normal(size=(8, 4, 24)), jnp.float32)

    def convolved(u: Any) -> Any:
        return jax.lax.conv_general_dilated(u, kernel, (1,), "SAME")

    inside = shard(convolved, (strategy,), device=jax.devices()[:4])
    around = shard(lambda u: inside(2 * u), outer, device=jax.devices()[:4])
    np.testing.assert_allclose(around(x), convolved(2 * x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        jax.grad(lambda u: jnp.sum(around(u) ** 2))(x), jax.grad(lambda u: jnp.sum(convolved(2 * u) ** 2))(x),
        rtol=1e-4, atol=1e-3,
    )  # fmt: skip

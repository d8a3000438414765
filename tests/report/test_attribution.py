"""A collective is attributed to the shardings that cause it, not to every array sharded over its axes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.cost.collectives import communication_bytes
from shardfn.ir.model import axis_name
from shardfn.planning.questions import causes
from shardfn.planning.questions.tested_attribution import _subject
from shardfn.report.report import make_report
from tests.marks import some_slow

S = jax.ShapeDtypeStruct


def tower(x, ws):
    for up, down in ws:
        x = x + jax.nn.relu(x @ up) @ down
    return x


def scanned(x, ws):
    def body(x, w):
        return x + jax.nn.relu(x @ w[0]) @ w[1], None

    return jax.lax.scan(body, x, ws)[0]


def due(plan):
    return {
        (row["kind"], *row["shape"]): row["cause"]["shardings"] for row in make_report(plan).to_dict()["collectives"]
    }


WS = [(S((32, 64), "float32"), S((64, 32), "float32")), (S((32, 128), "float32"), S((128, 32), "float32"))]
X = S((16, 32), "float32")


def test_each_sum_names_the_weights_that_it_sums_over():
    plan = shardfn.plan(tower, X, WS, in_strategy=((2, 1), [((1, 4), (4, 1)), ((1, 4), (4, 1))]), device="tpu-v5e:2x4")
    every = [row["cause"]["shardings"] for row in make_report(plan).to_dict()["collectives"]]
    assert sorted(map(sorted, every)) == [[f"ws/{i}/0 dim 1 over a", f"ws/{i}/1 dim 0 over a"] for i in (0, 1)], (
        "one axis shards all four of them"
    )


def test_what_is_gathered_names_what_is_cut():
    plan = shardfn.plan(tower, X, WS, in_strategy=((8, 1), [((8, 1), (1, 8)), ((1, 1), (1, 1))]), device="tpu-v5e:2x4")
    assert due(plan) == {
        ("all-gather", 4, 64): ["ws/0/0 dim 0 over a"],
        ("all-gather", 64, 4): ["ws/0/1 dim 1 over a"],
    }


def test_a_loop_carries_cuts_along():
    stacked = (S((3, 32, 64), "float32"), S((3, 64, 32), "float32"))
    plan = shardfn.plan(scanned, X, stacked, in_strategy=((1, 4), ((1, 4, 1), (1, 1, 4))), device="tpu-v5e:2x2")
    assert all("ws/0 dim 1 over a" in causes and "x dim 1 over a" in causes for (kind, *_), causes in due(plan).items()
               if kind == "all-reduce") and due(plan)  # fmt: skip


@pytest.mark.parametrize("level", [0, 2])
def test_every_collective_of_a_step_has_a_cause(level):
    def step(x, ws):
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(lambda ws: jnp.mean(tower(x, ws) ** 2))(ws))

    plan = shardfn.plan(step, X, WS, device="cpu:8", level=level, parameter_plan={"x": (8, 1)})
    assert due(plan) and all(due(plan).values())


@pytest.mark.parametrize("device", ["cpu:8", "h100:8", "tpu-v5e:2x4"])
@pytest.mark.parametrize(
    ("fn", "shapes", "entries"),
    [
        (lambda x: x[:32], [(64, 32)], [(8, 1)]),
        (lambda x: jnp.split(x, 3, axis=1), [(64, 48)], [(1, 8)]),
        (lambda x: jnp.roll(x, 3, 0), [(64, 32)], [(8, 1)]),
        (lambda x, w: jnp.split(x @ w, 3, -1), [(64, 32), (32, 96)], [(1, 1), (1, 8)]),
        (lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3), (1, 1), "SAME"), [(8, 64)], [(1, 8)]),
        (lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), [(2, 4, 32, 32), (8, 4, 3, 3)], [(1, 1, 8, 1), (1, 1, 1, 1)]),
    ],
)
def test_what_is_fetched_from_neighbours_has_its_causes(fn, shapes, entries, device):
    """Rows that arrive stand behind an op's operands, of which its rule speaks."""
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    made = shardfn.plan(fn, *args, in_strategy=tuple(entries), device=device)
    report = shardfn.explain(made)
    assert report.to_dict()["collectives"] and "Collectives" in str(report)


# ---- what is named is put to the test


def mlp(x, up, down):
    return jax.nn.relu(x @ up) @ down


def mlp_step(x, up, down):
    loss = lambda ws: (mlp(x, *ws) ** 2).mean()  # noqa: E731
    return jax.tree.map(lambda w, g: w - g, (up, down), jax.grad(loss)((up, down)))


def dense(x, w, b):
    return x @ w + b


LONG = S((65536, 256), "float32"), S((256, 1024), "float32"), S((1024, 256), "float32")

PROGRAMS = {
    "tensor parallel": (mlp, LONG, ((2, 1), (1, 4), (4, 1)), {}),
    "weights gathered inside": (mlp, LONG, ((2, 1), (1, 4), (4, 1)), {"level": 2}),
    "weights gathered in a step": (mlp_step, LONG, ((2, 1), (1, 4), (4, 1)), {"level": 2}),
    "data parallel": (mlp_step, LONG, ((8, 1), (1, 1), (1, 1)), {}),
    "fsdp": (mlp_step, LONG, None, {"style": "fsdp"}),
    "both sharded 8 ways": (
        dense,
        (S((64, 32), "float32"), S((32, 64), "float32"), S((64,), "float32")),
        ((8, 1), (1, 8), (1,)),
        {},
    ),
    "layers": (tower, (X, WS), ((2, 1), [((1, 4), (4, 1)), ((4, 1), (1, 4))]), {}),
    "searched": (tower, (S((512, 32), "float32"), WS), None, {"level": 0, "memory_limit": "60KiB"}),
}


def subjects(plan):
    return {(*_subject(plan.partitioned, c), axis) for c in plan.partitioned.communications if c.group_size > 1
            for axis in map(axis_name, c.axes)}  # fmt: skip


@pytest.mark.parametrize("name", some_slow([*PROGRAMS], ["searched"]))
def test_causes_without_the_named_ones_the_collective_is_gone(name):
    fn, args, entries, options = PROGRAMS[name]
    plan = shardfn.plan(fn, *args, in_strategy=entries, device="tpu-v5e:8", **options)
    sent = [c for c in plan.partitioned.communications if communication_bytes(plan.partitioned, c)]
    posed, answer = plan._answered.posed, plan._answered.answer
    assert len(sent) == len(causes(plan)) and sent
    for c, cause in zip(sent, causes(plan), strict=True):
        own = {one for one in subjects(plan) if one[:2] == _subject(plan.partitioned, c)}
        axes = {axis for *_, axis in own}
        specs = [
            without(d.spec, [i for other, i in cause.shardings if other.path == d.path], axes) for d in plan.inputs
        ]
        assert cause.shardings or cause.constraints
        if cause.constraints:
            kept = {index: made for (index, made), one in zip(sorted(answer.constraints.items()), plan.constraints, strict=True)
                    if one not in cause.constraints}  # fmt: skip
            program = posed.propagation(plan.axes, answer.specs, kept, answer.result_specs)
            assert not own & subjects(dataclasses.replace(plan, partitioned=program))
        if cause.shardings:
            program = posed.propagation(plan.axes, specs, {}, answer.result_specs)
            assert not own & subjects(dataclasses.replace(plan, partitioned=program))
            if len(cause.shardings) > 1:  # none of them is named in vain
                for left_out, _ in cause.shardings:
                    fewer = [
                        d.spec if d.path == left_out.path else spec for d, spec in zip(plan.inputs, specs, strict=True)
                    ]
                    program = posed.propagation(plan.axes, fewer, {}, answer.result_specs)
                    assert own & subjects(dataclasses.replace(plan, partitioned=program)), left_out.path


def without(spec, dims, axes):
    names = set(map(axis_name, axes))
    return tuple(tuple(a for a in dim if i not in dims or a not in names) for i, dim in enumerate(spec))


def test_causes_names_the_constraint_that_gathers_weights():
    made = shardfn.plan(mlp, *LONG, in_strategy=((2, 1), (1, 4), (4, 1)), device="tpu-v5e:8", level="time")
    (gathers, *_) = make_report(made).to_dict()["collectives"]
    assert gathers["kind"] == "all-gather" and gathers["cause"]["constraints"][0].startswith(
        "constraint on dot_general at "
    )
    followed = shardfn.plan(mlp, *LONG, in_strategy=((2, 1), (1, 4), (4, 1)), device="tpu-v5e:8", level="time",
                            search_mode="sharding_propagation")  # fmt: skip
    assert not any(c.kind == "all-gather" for c in followed.collectives)


def test_causes_what_if_without_the_named_array_has_no_such_collective():
    made = shardfn.plan(mlp_step, *LONG, in_strategy=((8, 1), (1, 1), (1, 1)), device="tpu-v5e:8")
    assert made.collectives
    assert {d.path for cause in causes(made) for d, _ in cause.shardings} == {"x"}
    assert not made.what_if({"x": (1, 1)}).collectives


@pytest.mark.parametrize(
    ("rows", "layer"), [((2, 1), ((4, 1), (1, 4))), pytest.param((2, 4), ((1, 4), (4, 1)), marks=pytest.mark.slow)]
)
def test_causes_of_more_collectives_than_can_be_tested_are_the_nearest_arrays(rows, layer):
    layers = 60

    def step(x, ws):
        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(lambda ws: jnp.mean(tower(x, ws) ** 2))(ws))

    ws = [(S((32, 64), "float32"), S((64, 32), "float32"))] * layers
    plan = shardfn.plan(step, X, ws, in_strategy=(rows, [layer] * layers), device="tpu-v5e:8")
    named = [{d.path for d, _ in cause.shardings} for cause in causes(plan)]
    assert len(named) >= layers
    assert all(named)
    assert max(map(len, named)) <= 3


# ---- what the user wrote in a `shard_map`


def written(x, w):
    y = jax.lax.psum(jnp.tanh(x @ w), "tp")
    z = jax.lax.all_gather(y, "dp", tiled=True)
    z = jax.lax.ppermute(z, "tp", [(i, (i + 1) % 4) for i in range(4)])
    return jax.lax.psum(jax.lax.all_to_all(w, "tp", 1, 0, tiled=True), ("dp", "tp")) + z.sum()


ON_MESH = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
MAPPED = jax.shard_map(
    written, mesh=ON_MESH, in_specs=(jax.P("dp", "tp"), jax.P("tp")), out_specs=jax.P(), check_vma=False
)
MATRICES = S((16, 64), "float32"), S((64, 64), "float32")


@pytest.mark.parametrize(
    ("entries", "dp", "tp"),
    [(None, ["dp"], ["tp"]), (((4, 1), (1, 1)), ["x0"], ["x1", "x2"])],
    ids=["on its mesh", "on a finer mesh"],
)
def test_report_collective_in_shard_map_has_its_mesh_axes_and_no_sharding_as_its_cause(entries, dp, tp):
    every = make_report(shardfn.plan(MAPPED, *MATRICES, in_strategy=entries)).to_dict()["collectives"]
    rows = [row for row in every if row["cause"]["op"] == "shard_map"]
    assert {(row["kind"], *row["axes"]): row["group_size"] for row in rows} == {
        ("all-reduce", *tp): 4, ("all-gather", *dp): 2, ("collective-permute", *tp): 4, ("all-to-all", *tp): 4,
        ("all-reduce", *dp, *tp): 8,
    }  # fmt: skip
    assert all(row["cause"] == {"op": "shard_map", "purpose": "", "shardings": [], "constraints": []} for row in rows)


def test_report_psum_over_groups_inside_an_axis_has_no_mesh_axes():
    groups = [[0, 1], [2, 3]]
    fn = jax.shard_map(lambda x: jax.lax.all_gather(x, "tp", axis_index_groups=groups, tiled=True), mesh=ON_MESH,
                       in_specs=jax.P("dp", "tp"), out_specs=jax.P("dp", "tp"), check_vma=False)  # fmt: skip
    rows = make_report(shardfn.plan(fn, MATRICES[0], device=ON_MESH)).to_dict()["collectives"]
    assert [(row["kind"], row["axes"], row["group_size"]) for row in rows] == [("all-gather", [], 2)]


@pytest.mark.parametrize("specs", [(jax.P("dp", "tp"), jax.P("tp")), (jax.P("dp"), jax.P())])
def test_flops_of_shard_map_are_those_of_all_its_devices(specs):
    fn = jax.shard_map(jnp.matmul, mesh=ON_MESH, in_specs=specs, out_specs=jax.P("dp"), check_vma=False)
    plan = shardfn.plan(fn, *MATRICES, device=ON_MESH)
    assert plan._answered.problem.facts.flops == 8 * plan.cost.flops

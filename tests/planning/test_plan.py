"""A plan as a text, as a pickle, and what differs in two of them."""

import copy
import dataclasses
import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn import AUTO, ShardError
from shardfn.errors import StrategyTypeError
from shardfn.planning.answers import search
from shardfn.planning.call import moves
from shardfn.planning.layout_rules import Constraint
from shardfn.planning.plan import answered_call
from shardfn.planning.plan.plan_diff import diff
from shardfn.planning.plan.summary import optimality
from shardfn.search.moves.constrained import results_there


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def stack(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["up"]) @ layer["down"]
    return x


LAYERS = [{"up": shaped(64, 128), "down": shaped(128, 64)} for _ in range(6)]
X = shaped(32, 64)


def made(**options):
    return shardfn.plan(stack, LAYERS, X, **{"device": "h100:8", "level": 2, **options})


# ---- as a function


def scaled(x, w, n, *, k):
    return k * (x @ w) ** n


ROWS, SQUARE, ONE = jnp.ones((8, 4)), jnp.ones((4, 4)), jnp.ones(())
CALLED = {
    "arrays": (jnp.dot, (ROWS, SQUARE), {}, {}, 2),
    "a lambda": (lambda x: x + 1, (ROWS,), {}, {}, 2),
    "static and by keyword": (scaled, (ROWS, SQUARE, 2), {"k": ONE}, {"static_argnums": 2}, 1),
}


@pytest.mark.parametrize(("function", "args", "kwargs", "options", "ways"), CALLED.values(), ids=CALLED)
def test_a_plan_that_is_called_says_what_to_write(function, args, kwargs, options, ways):
    plan = shardfn.plan(function, *args, **kwargs, **options, search_mode="sharding_propagation")
    with pytest.raises(StrategyTypeError, match="is no function") as error:
        plan(*args, **kwargs)
    names = dict(zip(inspect.signature(function).parameters, args, strict=False))
    space = {"shardfn": shardfn, "jax": jax, "plan": plan, plan.function: function, "f": function, **names, **kwargs}
    written = re.split(r"^write |, or with jax.jit alone: ", error.value.problems[0].fix)[1:]
    assert len(written) == ways
    for code in written:
        assert jnp.array_equal(eval(code, space), function(*args, **kwargs))


def test_a_pickled_plan_that_is_called_says_what_to_write():
    plan = pickle.loads(pickle.dumps(shardfn.plan(jnp.dot, ROWS, SQUARE, in_strategy=((8, 1), (1, 1)))))
    with pytest.raises(StrategyTypeError, match=r"shardfn\.shard\(dot, layout=plan\)\(a, b\)$"):
        plan(ROWS, SQUARE)


@pytest.mark.parametrize("ask", [shardfn.shard, shardfn.plan])
def test_a_plan_is_not_taken_for_a_function(ask):
    with pytest.raises(StrategyTypeError, match=f"`{ask.__name__}` takes a function, not a Plan"):
        ask(shardfn.plan(jnp.dot, ROWS, SQUARE, in_strategy=((8, 1), (1, 1))))


# ---- as text


def test_the_text_says_the_main_things_in_few_lines():
    plan = made()
    text = str(plan)
    assert len(text.splitlines()) < 25
    assert text.startswith(f"stack: {plan.kind}\ndevices: h100:8 (8 devices, not here), mesh ")
    assert "memory: fits with " in text and "objective: least time (level 2)" in text
    assert re.search(r"^params/\*/up +6 +float32\[64,128\] +\(.*\) +searched$", text, re.M)


def test_str_of_a_plan_has_the_first_diagnostic_and_its_fix():
    plan = dataclasses.replace(made(), diagnostics=("one thing; fix: do that", "two"))
    text = str(plan)
    assert "next step: do that\n" in text
    assert "2 diagnostics, the first: one thing; fix: do that" in text


def test_str_of_a_plan_shows_the_largest_arrays():
    arrays = [shaped(8, 8 + 8 * i) for i in range(40)]
    text = str(shardfn.plan(lambda a: [2 * x for x in a], arrays, device="h100:8", in_strategy=(None,)))
    assert len(text.splitlines()) < 35
    assert "the largest of 40" in text
    rows = re.findall(r"^a/(\d+)", text, re.M)
    assert rows == [*map(str, range(30, 40))], "in the order of the call"


def test_one_device():
    plan = made(device="cpu:1")
    assert str(plan).startswith("stack: one device\ndevices: cpu:1 (1 device, a target), mesh of one device")
    assert {d.source for d in plan.inputs} == {"propagated"}  # nothing was searched


@pytest.mark.parametrize(
    ("level", "gap", "sent_s", "text"),
    [
        (0, 0.0, 0.0, "proved optimal: nothing is sent, and compute takes at most 1.1 times an even share"),
        (0, 0.0, 1.0, "best of the candidates; summed over ops, the cost model does not allow a better one on the meshes tried"),
        (2, 1e-5, 0.0, "best of the candidates; summed over ops, the cost model does not allow a better one on the meshes tried"),
        (0, 0.023, 1.0, "best of the candidates; summed over ops, the cost model does not allow one more than 2.3% better on the meshes tried"),
        (2, 0.25, 1.0, "best of the candidates; summed over ops, the cost model does not allow one better than 3 s on the meshes tried"),
        (0, 0.93, 1.0, "best of the candidates"),
        (0, None, 1.0, "best of the candidates"),
        (1, None, 0.0, "best of the candidates"),
    ],
)  # fmt: skip
def test_only_a_cost_of_nothing_is_proved_optimal(level, gap, sent_s, text):
    plan = made()
    cost = dataclasses.replace(plan.cost, communication_s=sent_s, compute_s=4.0 - sent_s)
    candidates = (*plan.candidates[:1], *plan.candidates[:1])
    assert optimality(dataclasses.replace(plan, level=level, gap=gap, cost=cost, candidates=candidates)) == text


@pytest.fixture(scope="module")
def as_written():
    def step(x, w):  # searched as shifts of its rows; of the plan no row moves
        h = jnp.tanh(x[:, :-1] @ w)
        return ((h - x[:, 1:]) ** 2).mean()

    shapes = jax.ShapeDtypeStruct((64, 129, 512), "float32"), jax.ShapeDtypeStruct((512, 512), "float32")
    answered = answered_call(shardfn.plan(step, *shapes, level="time", device="h100:8"))
    assert answered.posed.call.function.is_as_written
    return answered


def test_a_bound_holds_for_the_form_that_is_compiled(as_written):
    alone = search(as_written.posed)  # of the program as it is written
    assert 0 < as_written.answer.bound_s <= alone.bound_s < as_written.problem.evaluate_answer(alone).time_s


def test_candidates_cost_what_is_compiled_of_them(as_written):
    problem, others = as_written.problem, as_written.answer.others
    still = [one for one in others if not moves(problem.partitioned_of(one))]
    assert len(still) > 3
    for one in still:
        assert one.cost == problem.evaluate_answer(one)


def test_ops_of_a_candidate_that_is_compiled_as_written_are_told_from_others():
    def spread(x):
        for _ in range(2):
            x = x.at[1:-1].add(x[2:] + x[:-2] - 2 * x[1:-1])
        return x, x.mean(1), jnp.tanh(x).sum()

    plan = shardfn.plan(spread, jax.ShapeDtypeStruct((1024, 64), "float32"), level="memory", device="h100:8")
    answered = answered_call(plan)
    problem, others = answered.problem, answered.answer.others
    still = [there for one in others if not moves(there := problem.partitioned_of(one))]
    assert problem.written is not None and still
    for there in still:
        found = results_there(problem, there)
        assert found
        for i, specs in found.items():
            assert [len(spec) for spec in specs] == [
                len(problem.graph.values[v].shape) for v in problem.graph.ops[i].outputs
            ]


@pytest.mark.parametrize(
    ("options", "sources"),
    [
        ({"in_strategy": ((8, 1), AUTO)}, ["you", "searched"]),
        ({"in_strategy": (AUTO, None), "search_mode": "sharding_propagation"}, ["propagated", "you"]),
        ({"search_mode": "recursive_programming"}, ["searched", "searched"]),
        ({"parameter_plan": {"x": (8, 1)}}, ["searched", "you"]),
    ],
)
def test_who_chose(options, sources):
    plan = made(**options)
    assert [plan.inputs[0].source, plan.inputs[-1].source] == sources
    assert plan.outputs[0].source == "propagated"


def test_a_notebook_shows_the_text():
    class Printer:
        def text(self, text):
            self.shown = text

    printer, plan = Printer(), made()
    plan._repr_pretty_(printer, False)
    assert printer.shown == str(plan)


# ---- as a pickle


def test_a_plan_can_be_pickled_and_copied():
    plan = made()
    found = pickle.loads(pickle.dumps(plan))
    assert found == plan
    assert found.partitioned == plan.partitioned
    assert str(found) == str(plan)
    with pytest.raises(ShardError, match="has no function"):
        found.why("x")
    with pytest.raises(ShardError, match="has no function"):
        found.what_if({})
    assert copy.deepcopy(plan).why("x", most=1).rows
    assert copy.copy(plan) == plan


def test_the_devices_of_this_process_are_not_pickled():
    plan = shardfn.plan(stack, LAYERS, X, in_strategy=(None, None))
    assert plan.hardware.is_here
    found = pickle.loads(pickle.dumps(plan))
    assert not found.hardware.is_here
    assert found == plan
    assert found.with_devices(jax.devices()).mesh == plan.mesh


# ---- what differs


def test_what_differs():
    first = made(in_strategy=((8, 1), (1, 1)))
    second = first.what_if({"params/*/up": (1, 8), "params/*/down": (1, 1)})
    rows = {c.what: (c.first, c.second) for c in first.diff(second)}
    assert first.diff(second) == diff(first, second)
    (up,) = [row for what, row in rows.items() if what.startswith("params/*/up")]
    assert [text[:6] for text in up] == ["(8, 1)", "(1, 8)"]
    assert {"modelled time", "sent per device", "peak memory per device"} <= set(rows)
    assert "x" not in rows
    assert "level" not in rows
    assert diff(first, first) == ()


def test_arrays_that_differ_alike_are_one_change():
    first = made(in_strategy=((8, 1), (1, 1)))
    second = first.what_if({"params/*/up": (1, 8), "params/*/down": (8, 1)})
    changes = {c.paths: str(c) for c in first.diff(second) if c.paths}
    ups = tuple(path for path in changes if "params/0/up" in path)
    assert len(ups) == 1 and {"params/0/up", "params/1/up"} <= set(ups[0])
    assert changes[ups[0]].startswith("params/*/up")
    assert f"({len(ups[0])} arrays)" in changes[ups[0]]
    assert len([path for of in changes for path in of]) == len({path for of in changes for path in of})


def test_cuts_that_only_lie_over_another_grid_are_one_change():
    first, axes = made(), (("b", 8),)
    renamed = tuple(dataclasses.replace(d, spec=tuple(tuple("b" for _ in dim) for dim in d.spec)) for d in first.inputs)
    sharded = tuple(d.path for d in first.inputs if any(d.spec))
    changes = [c for c in diff(first, dataclasses.replace(first, axes=axes, inputs=renamed)) if c.paths]
    assert sharded and [c.paths for c in changes] == [sharded]
    assert changes[0].second == "same strategy; only the mesh axes' names differ"


def test_equal_strategies_on_meshes_of_other_sizes_are_not_only_named_otherwise():
    meshes = (
        jax.make_mesh(sizes, ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2) for sizes in ((4, 2), (2, 4))
    )
    one, two = (
        shardfn.plan(jnp.sin, jax.ShapeDtypeStruct((8, 8), "float32"), in_strategy=((4, 2),), device=mesh)
        for mesh in meshes
    )
    (change,) = {c.second for c in one.diff(two) if c.paths}
    assert change == "same strategy, over other mesh axes"


def test_level_and_proof_differ():
    rows = {c.what: (c.first, c.second) for c in diff(made(), made(level=1, search_mode="recursive_programming"))}
    assert rows["level"] == ("2", "1")


def test_what_is_held_inside_differs():
    one = Constraint("dot_general", 3, "/home/me/model.py:7", ((("a",), ()), None), (None,))
    plan = dataclasses.replace(made(), constraints=(one,))
    (change,) = diff(dataclasses.replace(plan, constraints=()), plan)
    assert str(change) == "ops with sharding constraints: 0 -> 1; only here: 1 dot_general (model.py:7)"
    assert diff(plan, plan) == ()
    (change,) = diff(plan, dataclasses.replace(plan, constraints=(dataclasses.replace(one, results=(((), ()),)),)))
    assert change.first == change.second == "1; 1 sharded differently"


def test_many_that_are_held_are_told_by_kind_and_line():
    kinds = {"scatter": ("", ""), "dot_general": ("/a/m.py:1", "/a/m.py:2", "/a/m.py:2", "/a/m.py:9"), "add": ("/a/m.py:3",),
             "reduce": ("/a/m.py:5",)}  # fmt: skip
    held = [(kind, where) for kind, lines in kinds.items() for where in lines]
    many = tuple(Constraint(kind, n, where, (None,), (None,)) for n, (kind, where) in enumerate(held))
    (change,) = diff(dataclasses.replace(made(), constraints=many), dataclasses.replace(made(), constraints=many[-1:]))
    assert (change.first, change.second) == (
        "8; only here: 4 dot_general (m.py:1, m.py:2 and 1 more), 2 scatter (no line known), 1 add (m.py:3)", "1"
    )  # fmt: skip


def test_fit_of_a_plan_within_a_limit_above_the_device_says_that_it_exceeds_the_device():
    x = jax.ShapeDtypeStruct((40 * 2**20, 128), jnp.float32)  # 20 GiB, on one device of 14.9 GiB
    plan = shardfn.plan(lambda x: x + 1, x, device="tpu-v5e:1", memory_limit="64GiB")
    assert "fits the limit but not the device" in str(plan) and "too much for tpu-v5e" in str(plan)


@pytest.mark.parametrize("device", ["h100:4", "h100:16", "tpu-v5e:2x4"])
@pytest.mark.parametrize(
    "function",
    [
        jnp.diag,
        lambda x: x[jnp.arange(64), jnp.arange(64)],
        lambda x: jnp.fill_diagonal(x, 0.0, inplace=False),
        lambda x: jnp.trace(x) * x,
    ],
)
def test_plans_of_diagonals_whose_index_names_one_dimension_twice(function, device):
    plan = shardfn.plan(lambda x: function(x), jax.ShapeDtypeStruct((64, 64), "float32"), device=device)
    assert plan.cost.bytes_sent == 0 or len(plan.collectives) > 0

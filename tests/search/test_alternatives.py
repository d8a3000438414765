"""Small programs: no level's plan is worse at its own aim than what the library itself prices elsewhere."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn import ShardError
from shardfn.search import alternatives, one_array_changes
from shardfn.search.explanation import gap_text
from shardfn.search.problem import Memo, objective
from tests.search.problems import planned_problem

S = jax.ShapeDtypeStruct


def f32(*dims):
    return S(dims, jnp.float32)


def mlp(x, w1, w2):
    return jax.nn.relu(x @ w1) @ w2


def trained(loss):
    def step(p, *batch):
        value, grads = jax.value_and_grad(loss)(p, *batch)
        return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads), value

    return step


def looked_up(p, i):
    return jnp.mean((jax.nn.relu(p["t"][i].mean(1) @ p["w1"]) @ p["w2"]) ** 2)


def recurrent(p, x):
    def body(h, xt):
        h = jnp.tanh(xt @ p["w"] + h @ p["u"] + p["b"])
        return h, h

    return jnp.mean(jax.lax.scan(body, jnp.zeros((x.shape[1], p["u"].shape[0])), x)[1] ** 2)


MLP = f32(64, 128), f32(128, 256), f32(256, 64)
PROGRAMS = {
    "mlp": (mlp, MLP, {}),
    "look-up step": (trained(looked_up), ({"t": f32(2048, 32), "w1": f32(32, 128), "w2": f32(128, 32)}, S((64, 4), "int32")),
                     {"donate_argnums": 0}),
    "recurrent step": (trained(recurrent), ({"w": f32(64, 128), "u": f32(128, 128), "b": f32(128)}, f32(16, 8, 64)),
                       {"donate_argnums": 0}),
    "sort": (lambda x, w: (jnp.sort(x @ w, axis=1)[:, :32], jnp.argsort(x, axis=0)), (f32(64, 128), f32(128, 256)), {}),
    "concatenate": (lambda x, y, w: (jnp.concatenate([x, y], 0) @ w, jnp.roll(x, 1, 0), x[::-1]),
                    (f32(64, 64), f32(32, 64), f32(64, 64)), {}),
}  # fmt: skip


def plans(name, device) -> Any:
    fn, args, options = PROGRAMS[name]
    return [shardfn.plan(fn, *args, level=level, device=device, **options) for level in (0, 1, 2)]


@pytest.mark.parametrize(
    ("name", "device"),
    [("mlp", "cpu:8"), ("mlp", "cpu:6"), ("mlp", "cpu:12"), ("look-up step", "cpu:8"), ("sort", "cpu:8"),
     ("concatenate", "cpu:8")],
)  # fmt: skip
def test_no_level_loses_at_its_own_aim_and_no_row_beside_a_plan_is_better(name, device):
    made = plans(name, device)
    for own in made:
        aim = objective(own.cost, own._study.problem)
        for other in made:
            assert aim <= objective(other.cost, own._study.problem), (own.level, other.level)
        for d in (*own.inputs, *own.outputs):
            rows = () if "which it can replace" in d.reason else own.why(d.path).rows
            for row in rows:
                f = row.figures
                if own.level == 1:
                    assert f.memory >= own.cost.memory.peak, (d.path, row.strategy)
                elif own.level == 2:
                    assert f.time_s >= (1 - one_array_changes.WORTH) * own.cost.time_s, (d.path, row.strategy)


def test_a_cut_that_another_entry_finds_is_found():
    """One argument less cut: the same work, fewer bytes."""
    fn, args, options = PROGRAMS["recurrent step"]
    made = shardfn.plan(fn, *args, level=0, device="cpu:8", **options)
    other = made.what_if({"p/u": (1, 4)})
    assert made.cost.flops <= other.cost.flops
    assert made.cost.bytes_sent <= other.cost.bytes_sent


def test_the_least_that_a_limit_names_is_what_level_1_holds():
    least = plans("mlp", "cpu:8")[1].cost.memory.peak
    for limit in (least - 1, least / 4):
        with pytest.raises(ShardError, match="memory_limit") as error:
            shardfn.plan(mlp, *MLP, level=1, device="cpu:8", memory_limit=limit)
        assert int(str(error.value).rpartition("memory_limit=")[2]) <= least
    for level in (0, 1, 2):
        made = shardfn.plan(mlp, *MLP, level=level, device="cpu:8", memory_limit=least)
        assert made.cost.memory.peak <= least


# ---- what it may cost, and what is said


@pytest.fixture(scope="module")
def asked():
    """A problem at level 1, and what a poor answer of it is."""
    problem = planned_problem(mlp, *MLP, level=1, device="cpu:8")
    axes, whole = (("a", 8),), ((), ())
    return problem, problem.candidate("poor", axes, (whole,) * 3, {})


@pytest.mark.parametrize("gap", [0.0, 0.125, None])
def test_what_is_changed_is_told_and_no_longer_proved(asked, gap):
    problem, poor = asked
    reasons, policy = ("found",) * 3, f"a search: {gap_text(poor.axes, gap)} under the cost model"
    own = shardfn.search.Answer(poor.axes, poor.specs, reasons, policy, gap=gap)
    made = alternatives.improve_answer(problem, own, lambda _: own)
    assert made.gap is None and made.policy.startswith(f"a search: {gap_text(poor.axes, None)} under the cost model")
    assert "proved" not in made.policy and "changed by local search: `" in made.policy
    assert problem.evaluate_answer(made).memory.peak < poor.cost.memory.peak
    assert [r != "found" for r in made.reasons] == [a != b for a, b in zip(made.specs, poor.specs, strict=True)]
    large = dataclasses.replace(problem, graph=dataclasses.replace(problem.graph, ops=problem.graph.ops * 500))
    assert alternatives.improve_answer(large, own, lambda _: own) is own


def test_what_was_answered_is_of_the_search_and_of_what_was_given(asked):
    """A search of one's own may ask several of one problem, and a part of it."""
    problem = dataclasses.replace(asked[0], memo=Memo())
    first, second = (lambda problem, name=name: (name, problem.specs) for name in ("one", "other"))
    given = dataclasses.replace(problem, specs=(asked[1].specs[0], *problem.specs[1:]))
    found = [alternatives.cached_search(p, search_once) for p in (problem, given) for search_once in (first, second)]
    assert found == [(name, p.specs) for p in (problem, given) for name in ("one", "other")]
    assert alternatives.cached_search(problem, first) is found[0]

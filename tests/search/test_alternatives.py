"""Small programs: no level's plan is worse at its own aim than what the library itself prices elsewhere."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn import ShardError
from shardfn.cost.devices.hardware import resolve
from shardfn.search import alternatives, dynamic_programming, effort, one_array_changes
from shardfn.search.explanation import gap_text
from shardfn.search.problem import Memo, SearchCandidate, objective

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
            rows = () if "whose place it can take" in d.reason else own.why(d.path).rows
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
    found = []
    shardfn.register_search("listening", lambda p: found.append(p) or shardfn.search.MODES["auto"](p))
    try:
        shardfn.plan(mlp, *MLP, level=1, device="cpu:8", search_mode="listening")
    finally:
        shardfn.search.forget("listening")
    axes, whole = (("a", 8),), ((), ())
    return found[0], SearchCandidate("poor", axes, (whole,) * 3, {}, found[0].evaluate(axes, (whole,) * 3, {}))


def test_what_may_be_spent_bounds_the_flows(asked, monkeypatch):
    problem, poor = asked

    def improve(problem, ops):
        monkeypatch.setattr("shardfn.search.effort.AROUND_OPS", ops)
        return one_array_changes.improve(problem, poor)

    assert improve(problem, 0) is poor
    once = effort.FIXED + len(problem.graph.ops)
    peaks = [improve(problem, n * once).cost.memory.peak for n in (0, 1, 4, 400)]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0] / 2
    flows = []
    partitioned = lambda *choice: flows.append(choice) or problem.partition(*choice)  # noqa: E731
    improve(dataclasses.replace(problem, partition=partitioned, memo=Memo()), 7 * once)
    assert len({(axes, specs, tuple(result_specs.items())) for axes, specs, _, result_specs in flows}) <= 1 + 7


def test_less_than_a_thousandth_of_the_time_is_no_gain(asked):
    problem = dataclasses.replace(asked[0], level=2)
    poor = asked[1]
    for share, gains in ((0.9995, False), (0.99, True)):
        cost = dataclasses.replace(poor.cost, compute_s=share * poor.cost.time_s - poor.cost.communication_s)
        made = dataclasses.replace(poor, cost=cost)
        assert one_array_changes._is_better(problem, made, poor) == gains


@pytest.mark.parametrize("gap", [0.0, 0.125, None])
def test_what_is_changed_is_told_and_no_longer_proved(asked, gap):
    problem, poor = asked
    reasons, policy = ("found",) * 3, f"a search: {gap_text(poor.axes, gap)} under the cost model"
    own = shardfn.search.Answer(poor.axes, poor.specs, reasons, policy, gap=gap)
    made = alternatives.improve_answer(problem, own, lambda _: own)
    assert made.gap is None and made.policy.startswith(f"a search: {gap_text(poor.axes, None)} under the cost model")
    assert "proved" not in made.policy and "changed for a better flow: `" in made.policy
    assert problem.evaluate_answer(made).memory.peak < poor.cost.memory.peak
    assert [r != "found" for r in made.reasons] == [a != b for a, b in zip(made.specs, poor.specs, strict=True)]
    large = dataclasses.replace(problem, graph=dataclasses.replace(problem.graph, ops=problem.graph.ops * 500))
    assert alternatives.improve_answer(large, own, lambda _: own) is own


def test_a_level_is_searched_once(asked):
    problem, poor = dataclasses.replace(asked[0], memo=Memo()), asked[1]
    searched = []

    def search_once(problem):
        searched.append((problem.level, problem.memory_limit < asked[0].memory_limit))
        return shardfn.search.Answer(poor.axes, poor.specs, ("",) * 3, "")

    for level in (1, 0, 2, 1):
        one = dataclasses.replace(problem, level=level)
        alternatives.improve_answer(one, alternatives.cached_search(one, search_once), search_once)
    assert sorted(searched) == [(0, False), (0, True), (0, True), (1, False), (2, False)], (
        "level 1 asks level 0 for less, twice"
    )


def test_at_level_1_larger_programs_look_for_ever_less_memory(monkeypatch):
    """A search within a limit that is just missed tries more than the search for the least: 4 times at most, until it fails."""
    fn, args, options = PROGRAMS["look-up step"]
    asked = []
    peaks = {1: 1000, 990: 900, 891: 850, 841: 850}

    def search_once(problem):
        asked.append((problem.level, problem.memory_limit))
        return dataclasses.replace(own, policy=f"within {problem.memory_limit:.0f}")

    shardfn.register_search(
        "listening", lambda problem: problems.append(problem) or dynamic_programming.search_once(problem)
    )
    problems: list[Any] = []
    try:
        shardfn.plan(fn, *args, device="cpu:8", level=1, search_mode="listening", **options)
    finally:
        shardfn.search.forget("listening")
    problem = problems[0]
    own = dynamic_programming.search_once(problem)
    cost = problem.evaluate_answer(own)

    def evaluate_answer(self, answer):
        key = int(answer.policy.split()[-1]) if answer.policy.startswith("within") else 1
        return dataclasses.replace(cost, memory=SimpleNamespace(peak=peaks[key]))

    monkeypatch.setattr(type(problem), "evaluate_answer", evaluate_answer)
    monkeypatch.setattr("shardfn.search.effort.SMALL_OPS", 0)
    found = alternatives.improve_answer(problem, own, search_once)
    assert asked == [(2, 990.0), (2, 891.0), (2, 841.0), (0, 841.0)]
    assert problem.evaluate_answer(dataclasses.replace(found, policy="within 891")).memory.peak == 850
    assert found.policy.endswith("less memory by its flow: what levels 2 and 0 find within 99% of the least so far")
    assert found.gap is None and set(found.reasons) <= {"", "less memory by its flow than what the search found first"}
    monkeypatch.setattr("shardfn.search.effort.LARGE_OPS", 0)
    found = alternatives.improve_answer(problem, own, search_once)
    assert found.policy.endswith("less memory by its flow: what level 2 finds within 99% of the least so far")
    peaks[990] = 1000
    problem.memo.answers.clear()
    problem.memo.costs.clear()
    assert alternatives.improve_answer(problem, own, search_once) is own


def test_levels_0_and_2_of_larger_programs_ask_each_other_where_the_model_was_wrong(asked, monkeypatch):
    """Where no flow did what it promised; elsewhere, and of large programs, the answer stands."""
    monkeypatch.setattr("shardfn.search.effort.SMALL_OPS", 0)
    problem, poor = dataclasses.replace(asked[0], level=2, memo=Memo()), asked[1]
    levels = []

    def answer(axes, specs, **more):
        return shardfn.search.Answer(axes, specs, ("found",) * 3, "a search", **more)

    good = answer((("a", 8),), ((("a",), ()), ((), ()), ((), ())))

    def search_once(problem):
        levels.append(problem.level)
        return good

    plain = answer(poor.axes, poor.specs, is_uncertain=True)
    assert problem.evaluate_answer(good).time_s < problem.evaluate_answer(plain).time_s
    made = alternatives.improve_answer(problem, plain, search_once)
    assert made.specs == good.specs and "better by its flow: level 0's" in made.policy and levels == [0]
    for kept in (answer(poor.axes, poor.specs), dataclasses.replace(good, is_uncertain=True)):
        assert alternatives.improve_answer(dataclasses.replace(problem, memo=Memo()), kept, search_once) is kept
    monkeypatch.setattr("shardfn.search.effort.LARGE_OPS", 0)
    assert alternatives.improve_answer(dataclasses.replace(problem, memo=Memo()), plain, search_once) is plain


@pytest.mark.parametrize(("device", "times"), [("h100:8", 1), ("cpu:8", 0)])
def test_level_0_of_larger_programs_looks_within_less_memory_on_gpus(asked, monkeypatch, device, times):
    monkeypatch.setattr("shardfn.search.effort.SMALL_OPS", 0)
    problem = dataclasses.replace(asked[0], level=0, hardware=resolve(device), memo=Memo())
    limits = []

    def search_once(problem):
        limits.append((problem.level, problem.memory_limit))
        return own

    own = shardfn.search.Answer(asked[1].axes, asked[1].specs, ("found",) * 3, "a search")
    assert alternatives.improve_answer(problem, own, search_once) is own
    held = problem.evaluate_answer(own).memory.peak
    assert limits == [(0, int(alternatives.LESS * held))] * times


def test_what_was_answered_is_of_the_search_and_of_what_was_given(asked):
    """A search of one's own may ask several of one problem, and a part of it."""
    problem = dataclasses.replace(asked[0], memo=Memo())
    first, second = (lambda problem, name=name: (name, problem.specs) for name in ("one", "other"))
    given = dataclasses.replace(problem, specs=(asked[1].specs[0], *problem.specs[1:]))
    found = [alternatives.cached_search(p, search_once) for p in (problem, given) for search_once in (first, second)]
    assert found == [(name, p.specs) for p in (problem, given) for name in ("one", "other")]
    assert alternatives.cached_search(problem, first) is found[0]

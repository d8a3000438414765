"""What is true of every search on random programs: the budget only ends it, and no other objective finds much better plans."""

import dataclasses
import functools
import gc
import math
import sys

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn import AUTO, search
from shardfn.errors import ContextTypeError, StrategyError, StrategyTypeError
from shardfn.ir.model import OpConstraint
from shardfn.search import BASELINES, GENERATORS
from shardfn.search.engine import Archive, meshes, run, turns
from shardfn.search.engine.turns import FEWEST_CANDIDATES
from shardfn.search.explanation import answer_of
from shardfn.search.generators import exact, styles
from shardfn.search.generators.exact import best_first, solve_mesh
from shardfn.search.labels import LEAST_TIME, estimated_rank
from shardfn.search.problem import TIME, Figures, Proposal, objective, rank
from shardfn.search.problem.objectives import FULL_MEMORY_SHARE
from tests.marks import some_slow
from tests.search.problems import S, planned_problem, random_program, two_layers

SEEDS = range(0, 12)
LAYERS = tuple(S(shape, jnp.float32) for shape in ((64, 128), (128, 256), (256, 64)))


@functools.cache
def problem_of(seed, devices=8):
    function, args, _ = random_program(seed)
    return planned_problem(function, *args, device=f"cpu:{devices}")


def small(seed, visits):
    return dataclasses.replace(problem_of(seed), budget=visits, memory_limit=math.inf)


@pytest.mark.parametrize("seed", some_slow(SEEDS, {1, 3, 7, 8, 9, 10}))
def test_plan_is_at_most_one_percent_worse_at_its_own_aim_than_the_plans_of_the_others(seed):
    function, args, _ = random_program(seed)
    made = [shardfn.plan(function, *args, level=level, device="cpu:8", budget=3_000) for level in (0, 1, 2)]
    for own in made:
        aims = [objective(one.cost, own._answered.problem).aim[0] for one in made]
        assert aims[own.level] <= 1.01 * min(aims)


@pytest.mark.parametrize("seed", SEEDS)
def test_least_budget_is_no_worse_than_any_baseline(seed):
    problem = problem_of(seed)
    by_hand = Archive(dataclasses.replace(problem, memory_limit=math.inf))
    for proposal in styles.baselines(problem):
        by_hand.evaluate(proposal)
    for level in (0, 1, 2) if len(by_hand) else ():
        at = dataclasses.replace(problem.at(level), memory_limit=math.inf, budget=1)
        archive = run(at, GENERATORS[level], BASELINES)
        assert at.rank(archive.ranked(level)[0]) <= at.rank(by_hand.ranked(level)[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_fastest_plan_is_at_most_one_percent_slower_than_one_device(seed):
    function, args, _ = random_program(seed)
    alone = shardfn.plan(function, *args, device="cpu:1")
    made = shardfn.plan(function, *args, level="time", device="cpu:8", budget=1)
    assert made.cost.time_s <= (1 + FULL_MEMORY_SHARE) * alone.cost.time_s


def test_memory_decides_between_plans_of_almost_the_same_time():
    lean, full, faster = (
        rank(TIME, math.inf, Figures(communication_s=0.0, compute_s=time_s, even_s=0.0, peak=peak, memory_bytes=100))
        for time_s, peak in ((1.0, 20), (0.995, 100), (0.98, 100))
    )
    assert faster < lean < full


@pytest.mark.parametrize("seed", SEEDS)
def test_larger_budget_continues_the_same_sequence_of_candidates(seed):
    for level in (0, 1, 2):
        at = problem_of(seed).at(level)
        few, more = (run(small(seed, visits).at(level), GENERATORS[level]) for visits in (300, 1_200))
        assert min(FEWEST_CANDIDATES, len(more)) <= len(few) <= len(more)
        assert [made.key for made in few] == [made.key for made in more][: len(few)]
        assert at.rank(more.ranked(level)[0]) <= at.rank(few.ranked(level)[0])


@pytest.mark.parametrize("seed", some_slow(SEEDS, {1, 2, 3, 5, 7, 8, 9, 10, 11}))
def test_memory_limit_that_an_evaluated_candidate_keeps_is_kept(seed):
    function, args, _ = random_program(seed)
    options = {"device": "cpu:8", "budget": 1_000}
    made = shardfn.plan(function, *args, level=2, **options)
    peaks = sorted({c.figures.memory for c in made.candidates} or {made.cost.memory.peak})
    for limit in {peaks[0], peaks[len(peaks) // 2]}:
        for level in (0, 1, 2):
            assert shardfn.plan(function, *args, level=level, memory_limit=limit, **options).cost.memory.peak <= limit
    with pytest.raises(StrategyError, match="no plan"):
        shardfn.plan(function, *args, memory_limit=max(1, peaks[0] // 8), **options)


def test_least_candidates_are_evaluated_within_any_budget():
    tiny = run(small(3, 1), GENERATORS[0])
    assert FEWEST_CANDIDATES <= len(tiny) < len(run(small(3, 1_200), GENERATORS[0])) and tiny.budget.is_over


@pytest.mark.parametrize("budget", ["fast", pytest.param("default", marks=pytest.mark.slow), 2_000])
def test_budget_option_is_taken(budget):
    made = shardfn.plan(two_layers, *LAYERS, device="h100:8", budget=budget)
    assert made == shardfn.plan(two_layers, *LAYERS, device="h100:8", budget=budget)


@pytest.mark.parametrize(("budget", "fix"), [("thorogh", "did you mean 'thorough'"), (0, "100_000"), (True, "default")])
def test_wrong_budget_is_refused_with_the_fix(budget, fix):
    with pytest.raises((StrategyError, StrategyTypeError), match=fix):
        shardfn.plan(two_layers, *LAYERS, device="h100:8", budget=budget)


@pytest.mark.parametrize("level", [0, 2])
def test_search_ends_with_a_plan_that_is_proved_within_the_tolerance(level):
    options = {"device": "h100:8", "level": level}
    made, further = (shardfn.plan(jnp.matmul, *LAYERS[:2], **options, **more) for more in ({}, {"tolerance": 0}))
    assert len(made._answered.answer.others) < len(further._answered.answer.others)
    own, best = (objective(plan.cost, plan._answered.problem).aim[0] for plan in (made, further))
    assert own <= 1.01 * best


def test_thorough_search_goes_on_after_a_proof():
    problems = [
        shardfn.plan(
            jnp.matmul, *LAYERS[:2], device="h100:8", search_mode="sharding_propagation", **options
        )._answered.problem
        for options in ({}, {"budget": "thorough"}, {"budget": "thorough", "tolerance": 0.1}, {"tolerance": 0.1})
    ]
    assert [problem.tolerance for problem in problems] == [0.01, 0, 0.1, 0.1]


@pytest.mark.parametrize("seed", SEEDS)
def test_plan_that_is_proved_costs_what_the_bound_says(seed):
    for level in (0, 2):
        at = small(seed, 3_000).at(level)
        archive = run(at, GENERATORS[level], BASELINES)
        further = run(dataclasses.replace(at, tolerance=0), GENERATORS[level], BASELINES)
        assert [made.key for made in archive] == [made.key for made in further][: len(archive)]
        if archive.is_proved():
            assert at.rank(archive.best(level)).aim[0] <= 1.02 * at.rank(further.best(level)).aim[0]
        else:
            assert len(archive) == len(further)


@pytest.mark.parametrize("tolerance", [-0.1, 1, "1%", True])
def test_wrong_tolerance_is_refused_with_the_fix(tolerance):
    with pytest.raises((StrategyError, StrategyTypeError), match=r"write 0\.01"):
        shardfn.plan(two_layers, *LAYERS, device="h100:8", tolerance=tolerance)


def test_registered_generator_gets_the_baselines_and_the_local_search():
    seen = []

    def rows(problem, archive):
        specs = tuple(s if s is not None else (("a",), *((),) * (len(shape) - 1))
                      for s, shape in zip(problem.specs, problem.shapes, strict=True))  # fmt: skip
        yield Proposal("rows of all", (("a", 8),), specs)
        seen.append(archive.of(Proposal("rows of all", (("a", 8),), specs)).cost.bytes_sent)

    search.register("rows_of_all", rows)
    try:
        made = shardfn.plan(two_layers, *LAYERS, device="h100:8", search_mode="rows_of_all", level=2)
        generators = {made.generator for made in made._answered.answer.others}
    finally:
        search.forget("rows_of_all")
    assert len(seen) == 1 and seen[0] > 0
    assert "rows_of_all" in generators and "baselines" in generators
    assert any(name.startswith("local search") for name in generators)
    assert made.cost.bytes_sent <= seen[0]


def test_policy_names_the_generator_whose_candidate_is_the_plan():
    mine = Proposal("rows", (("a", 8),), ((("a",), ()), ((), ()), ((), ())))
    problem = planned_problem(two_layers, *LAYERS, device="h100:8")
    archive = run(problem, {"by_hand": lambda problem, archive: iter([mine])})
    assert (
        "the plan is a candidate of 'by_hand', the cheapest as a program: rows" in answer_of("search", archive).policy
    )


def known_for_ever(problem, archive):
    while True:
        yield Proposal("rows", (("a", 8),), ((("a",),),))


def none_for_ever(problem, archive):
    while True:
        yield None


@pytest.mark.parametrize(("generator", "budget"), [(known_for_ever, "default"), (none_for_ever, 1)])
def test_generator_that_proposes_nothing_new_for_ever_comes_to_an_end(generator, budget):
    problem = planned_problem(jnp.negative, S((64,), jnp.float32), device="cpu:8")
    archive = run(dataclasses.replace(problem, budget=budget), {"endless": generator}, BASELINES)
    assert 0 < len(archive) <= FEWEST_CANDIDATES


@pytest.mark.parametrize(
    ("proposal", "why"),
    [
        (Proposal("p", (("a", 16),), ((("a",), ()), ((), ()), ((), ()))), "does not name 8 devices"),
        (Proposal("p", (("a", 8),), ((("z",), ()), ((), ()), ((), ()))), "each of the axes a can shard one dimension"),
        (Proposal("p", (("a", 8),), ((("a",),), ((), ()), ((), ()))), "one tuple of axes for each of 2 dimensions"),
        (Proposal("p", (("a", 8),), (((), ()),)), "1 shardings for 3 arguments"),
        (Proposal("p", [["a", 8]], [[["a"], []], [[], []], [[], []]]), "tuples"),  # pyright: ignore
        (Proposal("p", (("a", 8),), (((), ()),) * 3, {99: OpConstraint((), ())}), "op 99 cannot be constrained"),
        (Proposal("p", (("a", 8),), (((), ()),) * 3, {0: "rows"}), "must be an OpConstraint"),  # pyright: ignore
        (Proposal("p", (("a", 8),), (((), ()),) * 3, None), "must be dictionaries"),  # pyright: ignore
        (Proposal("p", (("a", -8), ("b", -1)), (((), ()),) * 3), "its axis 'a' has the size -8"),
        (Proposal("p", (("a", 8.0),), (((), ()),) * 3), "has the size 8.0"),  # pyright: ignore
        (Proposal("p", (('a"b', 8),), (((), ()),) * 3), "an axis named"),
        (Proposal("p", (("a", 8, 1),), (((), ()),) * 3), "a tuple of pairs"),  # pyright: ignore
        (Proposal(None, (("a", 8),), (((), ()),) * 3), "reports show the name"),  # pyright: ignore
        ("rows", "a candidate is a Proposal"),
    ],
)
def test_proposal_of_a_registered_generator_that_fits_no_call_is_refused(proposal, why):
    search.register("wrong", lambda problem, archive: iter([proposal]))
    try:
        with pytest.raises((StrategyError, ContextTypeError), match=why):
            shardfn.plan(two_layers, *LAYERS, device="h100:8", search_mode="wrong")
    finally:
        search.forget("wrong")


def test_registered_generator_cannot_overrule_an_entry():
    unsharded = lambda problem, archive: iter([Proposal("p", problem.axes, (((), ()),) * 3)])  # noqa: E731
    search.register("wrong", unsharded)
    try:
        with pytest.raises(StrategyError, match="by an entry"):
            shardfn.plan(two_layers, *LAYERS, device="h100:8", search_mode="wrong", in_strategy=((4, 2), AUTO, AUTO))
    finally:
        search.forget("wrong")


def test_time_limit_leaves_out_meshes():
    problem = planned_problem(two_layers, *LAYERS, device="h100:64")
    ended = dataclasses.replace(problem, seconds=0.0)
    solved = []
    for each in (problem, ended):
        archive = Archive(each)
        next(exact.generate(LEAST_TIME, each, archive), None)
        solved.append(len(archive.solutions))
    assert solved == [len(meshes(problem)), 0]


def test_interrupt_ends_a_script():
    problem = small(3, 5_000)

    def stop(generator, archive):
        if len(archive) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(dataclasses.replace(problem, watch=stop), GENERATORS[problem.level])


@pytest.fixture
def _interactive(monkeypatch):
    monkeypatch.setattr(turns, "is_interactive", lambda: True)


def test_a_session_is_interactive_with_a_prompt(monkeypatch):
    assert not turns.is_interactive()
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert turns.is_interactive()


@pytest.mark.usefixtures("_interactive")
def test_interrupt_gives_the_best_so_far():
    problem = small(3, 5_000)

    def stop(generator, archive):
        if len(archive) == 4:
            raise KeyboardInterrupt

    archive = run(dataclasses.replace(problem, watch=stop), GENERATORS[problem.level])
    assert len(archive) == 4 and archive.was_interrupted
    with pytest.raises(KeyboardInterrupt):
        run(problem, {"none": lambda problem, archive: (_ for _ in ()).throw(KeyboardInterrupt)})


@pytest.mark.usefixtures("_interactive")
def test_interrupt_of_a_plan_is_said_in_its_policy():
    def interrupted(problem):
        return search.search_with("search", GENERATORS, dataclasses.replace(problem, watch=stop))

    def stop(generator, archive):
        raise KeyboardInterrupt

    search.register("interrupted", interrupted)
    try:
        made = shardfn.plan(two_layers, *LAYERS, device="h100:8", search_mode="interrupted")
    finally:
        search.forget("interrupted")
    assert "interrupted" in made.policy
    assert any("the search was interrupted, and the plan is the best of" in text for text in made.diagnostics)


def test_named_budgets_grow():
    sizes = [search.problem.budget.visits_of(name, 500, 2) for name in ("fast", "default", "thorough")]
    assert sizes == sorted(sizes) and jax.device_count() == 8


@pytest.mark.parametrize("seed", [3, 7])
def test_best_of_an_archive_is_the_first_in_rank_at_each_level(seed):
    archive = run(small(seed, 600), GENERATORS[0])
    for level in (0, 1, 2):
        assert archive.best(level) is archive.ranked(level)[0]


def test_turns_run_without_the_search_for_reference_cycles():
    during = []

    def watching(problem, archive):
        during.append(gc.isenabled())
        yield None

    run(small(3, 1), {"watching": watching})
    assert during == [False] and gc.isenabled()


@pytest.mark.parametrize("is_beaten", [False, True])
def test_estimates_count_less_where_another_generator_beat_that_of_its_mesh(is_beaten):
    problem = dataclasses.replace(planned_problem(two_layers, *LAYERS, device="h100:8", level=2), memory_limit=math.inf)
    archive = Archive(problem)
    found = [solve_mesh(problem, LEAST_TIME, axes, archive) for axes in meshes(problem)]
    best, worst = sorted(found, key=functools.partial(estimated_rank, problem))
    half = estimated_rank(problem, best).aim[0] / 2
    sizes = worst.axes if is_beaten else (("a", 2), ("b", 2), ("c", 2))  # a mesh with a solution, or without
    specs = tuple(((),) * len(shape) for shape in problem.shapes)
    cost = dataclasses.replace(problem.evaluate(sizes, specs, {}), compute_s=half, communication_s=0.0)
    problem.memo.costs[sizes, specs, (), ()] = cost
    archive.evaluate(Proposal("from another generator", sizes, specs))
    solved = set()
    for proposal in best_first(problem, found, archive):
        archive.evaluate(proposal)
        solved.add(proposal.solution.axes)
    assert solved == ({best.axes, worst.axes} if is_beaten else {best.axes})


def kalman(series, a, h):
    """Filters of 64 series, each in a loop of products of small matrices."""

    def filtered(observed):
        def step(carry, y):
            mean, spread = a @ carry[0], a @ carry[1] @ a.T + 0.1 * jnp.eye(4)
            gain = jnp.linalg.solve(h @ spread @ h.T + 0.2 * jnp.eye(2), h @ spread).T
            mean = mean + gain @ (y - h @ mean)
            return (mean, spread - gain @ h @ spread), mean

        return jax.lax.scan(step, (jnp.zeros(4), jnp.eye(4)), observed)[1]

    return jax.vmap(filtered)(series)


def test_least_communication_is_not_sent_in_a_loop_to_save_small_products():
    args = S((64, 8, 2), jnp.float32), S((4, 4), jnp.float32), S((2, 4), jnp.float32)
    made, fastest = (shardfn.plan(kalman, *args, device="cpu:8", level=level) for level in ("communication", "time"))
    assert made.cost.bytes_sent == 0
    assert made.cost.time_s <= 1.05 * fastest.cost.time_s

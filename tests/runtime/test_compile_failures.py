"""Plans that XLA does not compile: the next candidate takes the place, or a clear error says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardfn import REPLICATED, plan, shard
from shardfn.errors import StrategyError

X = np.arange(120, dtype=np.float32).reshape(8, 15)  # only dimension 0 can be sharded


@pytest.fixture(autouse=True)
def unknown_bugs(monkeypatch):
    """No bug of XLA is known, so that there are programs that it does not compile."""
    monkeypatch.setattr("shardfn.planning.answers.planner.wrong_ops", lambda *_: ())


def _observed(x):
    """XLA does not compile it where dimension 0 is sharded 8 ways."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    jax.debug.callback(lambda _: None, x)
    first = jax.lax.cond(True, lambda x: x[:1], lambda x: x[:1], x)
    first = jax.lax.with_sharding_constraint(first, NamedSharding(mesh, PartitionSpec()))
    return first, x * 2


LEAN = {"level": "memory", "search_mode": "recursive_programming"}


def test_shard_plan_that_does_not_compile_takes_the_next_candidate():
    sharded = shard(_observed, **LEAN)
    with pytest.warns(
        UserWarning, match="XLA does not compile the plan of `_observed` that the search chose: .*test_comp"
    ):
        found = sharded(X)
    for got, expected in zip(found, (X[:1], X * 2), strict=True):
        np.testing.assert_array_equal(got, expected)
    made = sharded.plan(X)
    assert made.inputs[0].strategy[0] < 8 and found[1].sharding.is_equivalent_to(made.out_shardings[1], 2)
    assert any("the plan, mesh 8, is left out, as XLA does not compile it" in note for note in made.diagnostics)
    np.testing.assert_array_equal(sharded(X)[1], X * 2)
    assert sharded.explain(X, compiled=True).to_dict()


def test_explain_compiled_of_a_plan_that_does_not_compile_shows_the_next_candidate():
    sharded = shard(_observed, **LEAN)
    with pytest.warns(UserWarning, match="its next candidate takes the place"):
        assert "is left out" in str(sharded.explain(X, compiled=True, detail="full"))


def test_gradient_of_a_plan_that_does_not_compile_takes_the_next_candidate_or_says_which_function():
    def total(x, *entries):
        return shard(_observed, entries or None, **LEAN)(x)[1].sum()

    with pytest.warns(UserWarning, match="XLA does not compile the plan of `_observed`"):
        np.testing.assert_array_equal(jax.grad(total)(X), np.full_like(X, 2))
    with pytest.raises(StrategyError, match="the plan of `_observed` does not compile") as error:
        jax.grad(total)(X, (8, 1))
    assert "test_compile_failures.py:" in error.value.problems[0].where and "REPLICATED" in error.value.problems[0].fix
    np.testing.assert_array_equal(jax.grad(total)(X, REPLICATED), np.full_like(X, 2))


def _call(entry):
    shard(_observed, (entry,))(X)


def _explain(entry):
    shard(_observed, (entry,)).explain(X, compiled=True)


def _verify(entry):
    plan(_observed, X, in_strategy=(entry,)).verify()


@pytest.mark.parametrize("use", [_call, _explain, _verify])
def test_entries_whose_plan_does_not_compile_are_an_error_with_the_line(use):
    with pytest.raises(StrategyError, match="the plan of `_observed` does not compile") as error:
        use((8, 1))
    (problem,) = error.value.problems
    assert "test_compile_failures.py:" in problem.where and problem.why.startswith("INTERNAL")
    assert error.value.__cause__ is None and error.value.__context__ is None
    assert "REPLICATED" in problem.fix
    use(REPLICATED)


@pytest.mark.parametrize(
    "use",
    [
        lambda f, **o: shard(f, **o)(X),
        lambda f, **o: shard(f, compile_candidates=3, **o)(X),
        lambda f, **o: shard(f, **o).explain(X, compiled=True),
        lambda f, **o: plan(f, X, **o).verify(),
    ],
    ids=["call", "compiled candidates", "explain", "verify"],
)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nope": 1}, "XLA has no compiler option 'nope'"),
        (
            {"xla_embed_ir_in_executable": "maybe"},
            "option 'xla_embed_ir_in_executable' has another type(.|\n)*'maybe' is not",
        ),
    ],
    ids=["name", "value"],
)
def test_compiler_option_that_xla_does_not_take_is_one_error_after_one_compile(use, options, says, monkeypatch):
    lowered = []
    real = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, *a, **o: lowered.append(self) or real(self, *a, **o)
    )
    with pytest.raises(StrategyError, match=says) as error:
        use(lambda x: jnp.tanh(x) @ x.T, compiler_options=options)
    (problem,) = error.value.problems
    assert next(iter(options)) in problem.fix and len(lowered) <= 1
    assert error.value.__suppress_context__ or error.value.__context__ is None


def test_ordered_callback_on_several_devices_is_refused():
    def prints(x):
        jax.debug.callback(lambda _: None, x, ordered=True)
        return x + 1

    with pytest.raises(StrategyError, match="in order") as error:
        shard(prints)(X)
    assert "device=jax.devices()[:1]" in error.value.problems[0].fix
    np.testing.assert_array_equal(shard(prints, device=jax.devices()[:1])(X), X + 1)


@pytest.mark.parametrize("is_placed", [False, True])
def test_first_call_compiles_once(is_placed):
    compiles = []

    def note(event, duration, **_):
        if "backend_compile" in event:
            compiles.append(event)

    sharded = shard(lambda x: jnp.tanh(x) * 3, ((8, 1),))
    (sharding,) = sharded.plan(X).in_shardings
    x = jax.device_put(X, sharding) if is_placed else X
    jax.monitoring.register_event_duration_secs_listener(note)
    sharded(x)
    count = len(compiles)
    sharded(x)
    assert count == len(compiles) == 1

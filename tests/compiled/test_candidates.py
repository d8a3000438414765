"""The best few plans are compiled, and the best compiled one wins."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn.compiled.candidates import CompiledCandidate, best
from shardfn.errors import DeviceError, StrategyError
from shardfn.search.problem import Figures
from shardfn.units import bytes_text

RNG = np.random.default_rng(0)
X, W1, W2 = (jnp.asarray(RNG.normal(size=shape) / 8, jnp.float32) for shape in ((64, 32), (32, 128), (128, 32)))


def mlp(x, w1, w2):
    return jax.nn.relu(x @ w1) @ w2


def step(w1, w2, x):
    grads = jax.grad(lambda w: (mlp(x, *w) ** 2).mean())((w1, w2))
    return w1 - 0.1 * grads[0], w2 - 0.1 * grads[1]


def test_compile_candidates_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DeviceError, match="GPU compiler is not installed"):
        shardfn.plan(step, W1, W2, X, device="h100:4", compile_candidates=3)


@pytest.mark.parametrize(
    ("function", "args", "level"), [pytest.param(step, (W1, W2, X), 1, marks=pytest.mark.slow), (mlp, (X, W1, W2), 2)]
)
def test_compile_candidates_takes_the_best_with_the_figures_of_xla(function, args, level):
    sharded = shardfn.shard(function, level=level, compile_candidates=3)
    found, wanted = sharded(*args), jax.jit(function)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, wanted)
    made = sharded.plan(*args)
    (told,) = (f for f in made.diagnostics if f.startswith("compiled 3 plans"))
    rows = figures(made)
    assert len(rows) == 3
    winner = re.search(r"Best: (.+?); the search alone", told)[1]
    sent, peak = re.search(re.escape(winner) + r", mesh \S+: ([\d,]+) B sent, ([\d,]+) B peak", told).groups()
    compiled = sharded.explain(*args, compiled=True).to_dict()["compiled"]
    assert int(peak.replace(",", "")) == compiled["memory"]["together"]["compiled"]
    assert int(sent.replace(",", "")) == sum(kind["compiled"]["bytes_sent"] for kind in compiled["kinds"].values())
    least = min(int(b.replace(",", "")) for _, b in rows)
    assert level != 1 or int(peak.replace(",", "")) == least


@pytest.mark.slow
def test_first_call_of_the_best_compiled_candidate_compiles_nothing_again(compiles):
    def only_here(w1, w2, x):
        return step(w1, w2, x)

    sharded = shardfn.shard(only_here, level=1, compile_candidates=3)
    sharded.plan(W1, W2, X)
    planned = compiles.count("jit(only_here)")
    sharded(W1, W2, X)
    assert planned == compiles.count("jit(only_here)") >= 3


def test_auto_compiles_what_a_part_of_the_budget_compiles():
    def compiled(function, *args, **options):
        made = shardfn.plan(function, *args, compile_candidates="auto", **options)
        told = [text for text in made.diagnostics if text.startswith("compiled ")]
        return int(told[0].split()[1]) if told else 0

    assert 2 <= compiled(mlp, X, W1, W2, budget=3_000) < compiled(mlp, X, W1, W2, budget=6_000)
    assert not compiled(mlp, X, W1, W2, budget=300)  # it compiles one, which is compared with none
    assert not compiled(mlp, X, W1, W2, device="tpu-v5e:2x2")  # the devices are not here
    assert not compiled(mlp, X, W1, W2, in_strategy=((4, 1), (1, 1), (1, 1)))  # nothing is open


def test_compile_candidates_for_a_target_is_refused():
    with pytest.raises(shardfn.ShardError, match="h100:8"):
        shardfn.plan(mlp, X, W1, W2, device="h100:8", compile_candidates=2)


@pytest.mark.parametrize("count", [-1, 1.5, True, "2", "automatic"])
def test_compile_candidates_that_is_no_count_is_refused(count):
    with pytest.raises(shardfn.ShardError, match="compile_candidates"):
        shardfn.shard(mlp, compile_candidates=count)


def test_best_ranks_the_limit_before_the_level():
    axes = (("a", 8),)
    small, quick = (
        CompiledCandidate("small", axes, 2, 10, 8.0, Figures(2.0, 0.0, 0.0, 100, 1e9)),
        CompiledCandidate("quick", axes, 2, 20, 8.0, Figures(1.0, 0.0, 0.0, 300, 1e9)),
    )
    assert best([small, quick], 1000)[0] == 1
    assert best([small, quick], 200)[0] == 0
    assert best([quick, quick], 1000)[0] == 0, "ties go to the search's own"
    assert "the search alone would have picked small" in best([small, quick], 1000)[1]
    assert "the search alone picked it too" in best([small, quick], 200)[1]


def figures(made):
    """Bytes sent and peak of each compiled plan, as the diagnostic says."""
    (told,) = (f for f in made.diagnostics if f.startswith("compiled "))
    return re.findall(r"(\d[\d,]*) B sent, ([\d,]+) B peak", told)


@pytest.mark.slow
def test_seven_candidates_are_the_same_at_each_level():
    """Else another level's plan may be better as compiled at this level's aim, and never be compiled for it."""
    one, two, three = (
        figures(shardfn.shard(mlp, level=level, compile_candidates=7).plan(X, W1, W2)) for level in (0, 1, 2)
    )
    assert len(one) == 7 and sorted(one) == sorted(two) == sorted(three)


@pytest.mark.slow
def test_a_candidate_is_compiled_once_whatever_the_limit(compiles):
    def scaled(x, w1, w2):
        return mlp(3 * x, w1, w2)

    first = shardfn.shard(scaled, level=2, compile_candidates=3).plan(X, W1, W2)
    assert len(compiles) == 3
    again = shardfn.shard(scaled, level=2, compile_candidates=3, memory_limit="1GiB").plan(X, W1, W2)
    assert len(compiles) == 3 and again.cost == first.cost
    shardfn.shard(lambda x, w1, w2: scaled(2 * x, w1, w2), level=2, compile_candidates=2).plan(X, W1, W2)
    assert len(compiles) == 5


def test_memory_limit_is_judged_as_compiled():
    """A candidate that is predicted to take more memory is compiled before another answer replaces it."""
    with pytest.raises(shardfn.ShardError) as error:
        shardfn.shard(mlp, level=2, compile_candidates=3, memory_limit=1000).plan(X, W1, W2)
    least = re.search(
        r"none of 3 plans .* 0.977 KiB.*the least is ([^:]+):.*or memory_limit=(\d+)", str(error.value), re.S
    )
    assert least[1] == bytes_text(int(least[2]))
    assert shardfn.shard(mlp, level=2, compile_candidates=3, memory_limit=int(least[2])).plan(X, W1, W2)


def refuses(monkeypatch, which):
    """XLA stops at the compilations that `which` names, by number."""
    compile_, count = jax.stages.Lowered.compile, itertools.count()

    def compiled(self, *args, **options):
        if which(next(count)):
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such op: {\n  %r = xor()\n}")
        return compile_(self, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiled)


def test_a_candidate_that_does_not_compile_is_left_out_and_named(monkeypatch):
    refuses(monkeypatch, lambda number: number in (0, 2))
    sharded = shardfn.shard(lambda x, w1, w2: mlp(x, 5 * w1, w2), level=0, compile_candidates=4)
    made = sharded.plan(X, W1, W2)
    monkeypatch.undo()
    left = [f for f in made.diagnostics if "is left out" in f]
    assert len(set(left)) == 2, "each by its own name"
    assert all(
        re.fullmatch(r".+, mesh [\dx]+, is left out, as XLA does not compile it: UNIMPLEMENTED: no such op", f)
        for f in left
    )
    assert left[0].startswith("the search's, mesh") and len(figures(made)) == 2
    assert any("would have picked the search's" in f for f in made.diagnostics)
    np.testing.assert_allclose(sharded(X, W1, W2), mlp(X, 5 * W1, W2), rtol=1e-4, atol=1e-5)


def test_candidates_none_of_which_compiles_are_an_error(monkeypatch):
    refuses(monkeypatch, lambda number: True)
    with pytest.raises(StrategyError) as error:
        shardfn.shard(lambda x, w1, w2: mlp(x, 7 * w1, w2), compile_candidates=3).plan(X, W1, W2)
    (problem,) = error.value.problems
    assert re.fullmatch(r"none of [123] plans of `<lambda>` compiles", problem.what)
    assert "compile_candidates = " in problem.where and problem.why == "UNIMPLEMENTED: no such op"
    assert "compile more of them (compile_candidates=)" in problem.fix

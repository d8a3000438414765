"""Which op belongs to which stage."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from shardfn import train
from shardfn.errors import StrategyError
from shardfn.train.pipelines.stages import split_into_stages
from shardfn.train.pipelines.trace_loss import cost_s, trace_loss

D = 8
X = jax.ShapeDtypeStruct((4, D), jnp.float32)
W = jax.ShapeDtypeStruct((D, D), jnp.float32)


def chain(ws, x):
    mask = jnp.tril(jnp.ones((D, D)))  # of nothing
    for w in ws:
        x = jnp.tanh(x @ (w.T * mask))
    return x.mean() + 0.1 * sum(jnp.sum(w**2) for w in ws)


def made(function=chain, count=2, marks=(None,) * 4, layers=0, by_cost=False, leaves=4, devices=None, **more):
    program = trace_loss(function, [W] * leaves, (X,))
    return split_into_stages(
        program, count, devices or count, list(marks), layers, by_cost, [f"w{i}" for i in range(leaves)], **more
    )


def test_marks():
    found = made(marks=(0, None, 1, None))
    assert found.stage_of_leaf == (0, 0, 1, 1)
    first, last = found.stages
    assert [op.eqn.primitive.name for op in first.equations].count("dot_general") == 2
    # the mask is worked out on both; the squares of the first stage's weights there, and one number of them sent on
    assert len(first.sends) == 2 and not last.sends
    assert {found.jaxpr.avals[v].shape for v in first.sends} == {(4, D), ()}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_balance_is_the_best_contiguous_cut(count):
    """Uneven layers: no contiguous cut of the same ops is better by more than the slack."""

    def uneven(ws, x):
        for i, w in enumerate(ws):
            for _ in range(1 + 3 * (i % 3)):
                x = jnp.tanh(x @ w)
        return x.mean()

    found = made(uneven, count, (None,) * 7, by_cost=True, leaves=7)
    program = found.jaxpr
    costs = [cost_s(op.eqn) for op, stage in zip(program.equations, found.stage_of, strict=True) if stage is not None]
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *begins, len(costs)]))
        for begins in itertools.combinations(range(1, len(costs)), count - 1)
    )
    assert found.bound_s == pytest.approx(best)
    assert best <= found.longest_s <= 1.021 * best


def test_other_shapes_are_cut_alike():
    found = made(by_cost=True)
    program = trace_loss(chain, [W] * 4, (jax.ShapeDtypeStruct((64, D), jnp.float32),))
    again = split_into_stages(program, 2, 2, [None] * 4, 0, True, "abcd", found)
    assert again.stage_of == found.stage_of


ERRORS = [
    ({"marks": (1, 0, 1, 1)}, "the stage mark of `w1` goes backwards"),
    ({"marks": (0, 0, 0, 2)}, "`w3` is marked for stage 2"),
    ({"marks": (0, 0, 0, 0)}, "stage 1 of 2 is empty"),
    ({"count": 99, "by_cost": True}, "cannot form 99 stages"),
]


@pytest.mark.parametrize(("wrong", "message"), ERRORS, ids=[m for _, m in ERRORS])
def test_errors(wrong, message):
    with pytest.raises(StrategyError) as caught:
        made(**wrong)
    assert message in str(caught.value)
    assert "fix:" in str(caught.value)


def test_staged_backwards():
    def backwards(ws, x):
        return train.staged(jnp.dot, 0)(train.staged(jnp.dot, 1)(x, ws[0]), ws[1]).sum()

    with pytest.raises(StrategyError, match="go back from stage 1 to stage 0"):
        made(backwards, leaves=2, marks=(None, None))


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda ws, x: x @ ws[0], "float32[4, 8]"),
        (lambda ws, x: (x.sum(), 1.0), "float32[]"),
        (lambda ws, x: 3, "int32[]"),
    ],
)
def test_a_loss_is_one_number(function, given):
    with pytest.raises(StrategyError) as caught:
        made(function, leaves=1, marks=(None,))
    assert given in str(caught.value)

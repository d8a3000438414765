"""`enable_alltoall=False` keeps all-to-alls out of what XLA compiles, and the report counts the gathers in their place."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardfn
import shardfn.mindspore as ms
from shardfn import experts
from tests.marks import some_slow

X = jnp.arange(64 * 64.0).reshape(64, 64) / 999
W = jnp.cos(X) / 9
KINDS = re.compile(r" (all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter)(?:-start)?\(")


def layout(*spec):
    return NamedSharding(jax.make_mesh((8,), ("a",), (AxisType.Auto,)), PartitionSpec(*spec))


def marked(x):
    return shardfn.reshard(jnp.sin(x), layout(None, "a")) * 2


def neighbours(x):
    return shardfn.reshard(shardfn.reshard(x, layout("a")), layout(None, "a")) * 2


def in_a_loop(x):
    body = lambda c, _: (shardfn.reshard(shardfn.reshard(c, layout(None, "a")) + 1, layout("a")), None)  # noqa: E731
    return jax.lax.scan(body, x, None, length=3)[0]


def in_a_branch(x):
    return jax.lax.cond(x[0, 0] > 1, neighbours, lambda x: x * 2, x)


def attention(x, w):
    """By heads inside, by tokens outside."""
    q = shardfn.reshard((x @ w).reshape(64, 8, 8), layout(None, "a"))
    scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, q))
    y = shardfn.reshard(jnp.einsum("hqk,khd->qhd", scores, q), layout("a"))
    return y.reshape(64, 64) @ w


def experts_of(x, w):
    sent = experts.dispatch(x, experts.route(x @ w[:, :8], 2, capacity_factor=1.0, groups=8), layout=layout("a"))
    return experts.combine(jnp.tanh(sent.rows), sent)


ROWS, COLUMNS, UNSHARDED = ((8, 1),), ((1, 8),), ((1, 1),)
CASES = {
    "a mark": (marked, (X,), ROWS, None),
    "an argument": (lambda x: shardfn.reshard(x, layout(None, "a")), (X,), ROWS, None),
    "a result": (jnp.sin, (X,), ROWS, COLUMNS),
    "a transposed result": (lambda x: x.T + 1, (X,), ROWS, ROWS),
    "two products": (lambda x, w: jnp.tanh(x @ w) @ w, (X, W), (*COLUMNS, *COLUMNS), ROWS),
    "attention": (attention, (X, W), (*ROWS, (1, 1)), None),
    "neighbouring marks": (neighbours, (X,), UNSHARDED, None),
    "neighbouring marks of a result": (lambda x: neighbours(jnp.sin(x)), (X,), UNSHARDED, UNSHARDED),
    "neighbouring marks in a gradient": (jax.grad(lambda x: (neighbours(x) ** 2).sum()), (X,), UNSHARDED, None),
    "neighbouring marks in a branch": (in_a_branch, (X,), UNSHARDED, None),
    "marks in a loop": (in_a_loop, (X,), ROWS, None),
    "experts": (experts_of, (X, W), (*ROWS, (1, 1)), ROWS),
}


@pytest.mark.parametrize("case", some_slow([*CASES], ["experts"]))
def test_without_alltoall_the_program_gathers_as_the_report_says(case):
    function, values, entries, results = CASES[case]

    def make() -> Any:
        return shardfn.shard(function, in_strategy=entries, out_strategy=results)

    own = make()
    assert "all-to-all" in KINDS.findall(own.lower(*values).compile().as_text() or "")
    with ms.auto_parallel(enable_alltoall=False):
        other = make()
        compiled = other.lower(*values).compile().as_text() or ""
        plan, found = other.plan(*values), other(*values)
    assert "all-to-all" not in compiled
    assert {c.kind for c in plan.collectives} >= set(KINDS.findall(compiled))
    assert plan.cost.bytes_sent > own.plan(*values).cost.bytes_sent
    assert not any("enable_alltoall" in note for note in plan.diagnostics)
    np.testing.assert_allclose(found, jax.jit(function)(*values), rtol=1e-4, atol=1e-5)


def test_an_alltoall_without_a_place_is_named():
    opaque = jax.custom_batching.custom_vmap(neighbours)  # which is not opened
    opaque.def_vmap(lambda size, is_batched, x: (jax.vmap(neighbours)(x), True))
    with ms.auto_parallel(enable_alltoall=False):
        plan = shardfn.plan(opaque, X, in_strategy=UNSHARDED)
    [note] = [note for note in plan.diagnostics if "enable_alltoall" in note]
    assert "test_detours.py" in note


def test_the_key_is_none_until_it_is_set():
    assert ms.get_auto_parallel_context("enable_alltoall") is None
    with ms.auto_parallel(enable_alltoall=True):
        assert ms.get_auto_parallel_context("enable_alltoall") is True
        plan = shardfn.plan(jnp.sin, X, in_strategy=ROWS, out_strategy=COLUMNS)
        assert [c.kind for c in plan.collectives] == ["all-to-all"] and not plan.detours

"""The dims that an op moves data along."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardfn.train.pipelines.tensor_parallel import unshardable_dims

X = jnp.ones((4, 6, 8))
W = jnp.ones((3, 8, 8))


@jax.custom_jvp
def halves(x):
    return x[..., :4] * x[..., 4:]


halves.defjvp(lambda x, t: jax.jvp(lambda x: x[..., :4] * x[..., 4:], x, t))

ROWS = [  # function, primitive, dims held of its inputs, of its outputs
    (lambda x: x[:, 1:3], "slice", [(1,)], [(1,)]),
    (lambda x: x[..., ::2], "slice", [(2,)], [(2,)]),
    (lambda x: jnp.split(x, 2, -1), "split", [(2,)], [(2,), (2,)]),
    (lambda x: jnp.concatenate([x, x], 1), "concatenate", [(1,), (1,)], [(1,)]),
    (lambda x: jnp.pad(x, ((0, 0), (0, 1), (0, 0))), "pad", [(1,), ()], [(1,)]),
    (lambda x: x[:, ::-1], "rev", [(1,)], [(1,)]),
    (lambda x: lax.dynamic_slice_in_dim(x, 1, 2, 1), "dynamic_slice", [(1,), (), (), ()], [(1,)]),
    (lambda x: lax.dynamic_update_slice_in_dim(x, x[:, :2], 1, 1), "dynamic_update_slice", [(1,), (1,)], [(1,)]),
    (lambda x: jnp.cumsum(x, 1), "cumsum", [(1,)], [(1,)]),
    (lambda x: jnp.sort(x, 1), "sort", [(1,)], [(1,)]),
    (lambda x: lax.top_k(x, 2), "top_k", [(2,)], [(2,), (2,)]),
    (lambda x: x[jnp.array([0, 1])], "gather", [(), ()], [()]),  # of an embedding: summed over the pieces
    (lambda x: x.at[:, :2].set(0.0), "scatter", [(1,), (), (1,)], [(1,)]),
    (lambda x: lax.conv_general_dilated(x, W, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
     "conv_general_dilated", [(1,), (0,)], [(1,)]),
    (lambda x: x.reshape(4, 48), "reshape", [(2,)], [()]),  # the first of those that are joined may stay in pieces
    (lambda x: x.reshape(4, 6, 2, 4), "reshape", [()], [(3,)]),
    (lambda x: x.reshape(24, 8), "reshape", [(1,)], [()]),
    (lambda x: x.reshape(4, 3, 2, 8), "reshape", [(1,)], [(1, 2)]),  # three blocks of two cannot be in two pieces
    (lambda x: x[:, None], "broadcast_in_dim", [()], [()]),
    (lambda x: jnp.einsum("abc,dce->abe", x, W), "dot_general", [(), ()], [()]),
    (lambda x: x.sum(1), "reduce_sum", [()], [()]),
    (halves, "custom_jvp_call", [(0, 1, 2)], [(0, 1, 2)]),
    (jax.nn.relu, "custom_jvp_call", [()], [()]),
]  # fmt: skip


def walked(jaxpr):
    for eqn in jaxpr.eqns:
        inside = eqn.params.get("jaxpr") if eqn.primitive.name in ("jit", "pjit") else None
        yield from walked(inside.jaxpr) if inside is not None else [eqn]


@pytest.mark.parametrize(("function", "name", "given", "made"), ROWS, ids=lambda v: v if isinstance(v, str) else "")
def test_rows(function, name, given, made):
    eqn = next(e for e in walked(jax.make_jaxpr(function)(X).jaxpr) if e.primitive.name == name)
    before, after = unshardable_dims(eqn)
    assert (list(before[: len(given)]), list(after)) == (given, made)
    assert len(before) == len(eqn.invars) and not any(before[len(given) :])

"""Which inputs' rows a scan takes, wherever it stands."""

import jax
import jax.numpy as jnp
import pytest

from shardfn.ir.scanned_inputs import scanned_inputs

X, W, B = jnp.ones((2, 4)), jnp.ones((6, 4, 4)), jnp.ones((6, 4))


def layers(x, w, b):
    return jax.lax.scan(lambda x, wb: (jnp.tanh(x @ wb[0] + wb[1]), None), x, (w, b))[0]


def custom():
    function = jax.custom_vjp(layers)
    function.defvjp(lambda *args: jax.vjp(layers, *args), lambda back, g: back(g))
    return function


FORMS = {
    "as it stands": layers,
    "jitted": jax.jit(jax.jit(layers)),
    "checkpointed": jax.checkpoint(layers),
    "a rule of its own": custom(),
    "cast and scaled": lambda x, w, b: layers(x, (w.astype("bfloat16") * 2).astype("float32"), jax.jit(jnp.abs)(b)),
    "in a loop": lambda x, w, b: jax.lax.fori_loop(0, 3, lambda i, x: layers(x, w, b), x),
    "as what a loop carries": lambda x, w, b: jax.lax.fori_loop(0, 3, lambda i, s: (layers(*s), *s[1:]), (x, w, b))[0],
    "in a branch": lambda x, w, b: jax.lax.cond(x.sum() > 0, layers, lambda x, w, b: x, x, w, b),
    "in another scan": lambda x, w, b: jax.lax.scan(lambda x, _: (layers(x, w, b), None), x, None, 3)[0],
    "gradient": jax.grad(lambda x, w, b: layers(x, w, b).sum(), (1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_rows_of_the_parameters_are_scanned(form):
    assert scanned_inputs(jax.make_jaxpr(FORMS[form])(X, W, B).jaxpr) == {1: 6, 2: 6}


def test_a_transposed_array_and_a_sum_of_two_are_none():
    moved = jax.make_jaxpr(lambda x, w, b: layers(x, w.transpose(1, 0, 2), b))(X, jnp.ones((4, 6, 4)), B).jaxpr
    assert scanned_inputs(moved) == {2: 6}
    added = jax.make_jaxpr(lambda x, w, b, c: layers(x, w, b + c))(X, W, B, B).jaxpr
    assert scanned_inputs(added) == {1: 6}


def test_scatters_and_linear_solves_are_no_scans():
    def solved(x, a):
        return jax.scipy.sparse.linalg.cg(lambda v: a @ v, x)[0], a.at[0].add(x)

    assert scanned_inputs(jax.make_jaxpr(solved)(jnp.ones(4), jnp.eye(4)).jaxpr) == {}


def test_the_condition_of_a_loop_has_constants_of_its_own():
    def condition(vs, count):
        return jax.lax.scan(lambda s, v: (s + v.sum(), None), 0.0, vs)[0] > count

    def looped(x, ws, vs):
        def body(c):
            return c[0] + 1, jax.lax.scan(lambda y, w: (y @ w, None), c[1], ws)[0]

        return jax.lax.while_loop(lambda c: condition(vs, c[0]), body, (0.0, x))

    assert scanned_inputs(jax.make_jaxpr(looped)(X, W, jnp.ones((5, 4, 4))).jaxpr) == {1: 6, 2: 5}

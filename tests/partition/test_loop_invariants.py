"""Loop invariants: what XLA computes before a loop is counted once."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn import compiled

S = jax.ShapeDtypeStruct
W, X = S((64, 64), "float32"), S((64, 64), "float32")
ROWS, REPLICATED = (8, 1), (1, 1)
ROUNDS = 20


def looped(body, rounds=ROUNDS):
    return lambda x, w: jax.lax.fori_loop(0, rounds, lambda i, h: body(h, w), x)


def nested(x, w):
    def outer(i, h):
        return jax.lax.fori_loop(0, 3, lambda j, h: jnp.tanh(h @ (w @ w) + h @ jnp.exp(h)), h)

    return jax.lax.fori_loop(0, 5, outer, x)


def nested_with_reshapes(x, w):
    """The inner loop reads a reshape both hoisted with what it leads to and in its body; the outer loop looks at both."""

    def inner(i, h):
        rows = jnp.reshape(w, (8, 8, 64))
        repeated = jnp.broadcast_to(jnp.exp(rows).sum(1, keepdims=True), (8, 8, 64)).reshape(64, 64)
        return jnp.tanh(h @ repeated) + rows.reshape(64, 64) * h

    return jax.lax.fori_loop(0, 4, lambda j, h: jax.lax.fori_loop(0, 3, inner, h * 1.5), x)


def branched(x, w):
    def body(i, h):
        return jax.lax.cond(i % 2 == 0, lambda: h @ jnp.exp(w), lambda: h + jnp.sin(w))

    return jax.lax.fori_loop(0, ROUNDS, body, x)


def scanned(x, w):
    return jax.lax.scan(lambda h, y: (jnp.tanh(h @ (y + w @ w)), None), x, jnp.stack([x] * 6))[0]


BODIES = {
    "elementwise": looped(lambda h, w: jnp.tanh(h @ jnp.exp(w))),
    "matmul": looped(lambda h, w: jnp.tanh(h @ (w @ w))),
    "transposed": looped(lambda h, w: jnp.tanh(h @ w.T)),
    "both": looped(lambda h, w: jnp.tanh(h @ w.T + w.T)),
    "added": looped(lambda h, w: h + jnp.tanh(w)),
    "masked": looped(lambda h, w: jnp.where(jnp.tril(jnp.ones((64, 64), bool)), h @ w, 0.0)),
    "recomputed": looped(jax.checkpoint(lambda h, w: jnp.tanh(h @ jnp.exp(w)))),
    "once": looped(lambda h, w: jnp.tanh(h @ jnp.exp(w)), 1),
    "nested": nested,
    "nested, reshapes": nested_with_reshapes,
    "branched": branched,
    "scanned": scanned,
}


def sent(collectives):
    return sum(c.total_bytes for c in collectives)


@pytest.mark.parametrize("entries", [(ROWS, ROWS), (ROWS, REPLICATED)], ids=["rows", "batch"])
@pytest.mark.parametrize("name", BODIES)
def test_loop_invariants_count_as_often_as_xla_runs_them(name, entries):
    function: Any = shardfn.shard(BODIES[name], entries, device=jax.devices()[:8])
    plan = function.plan(X, W)
    real = compiled.read(function.lower(X, W).compile())
    assert sent(plan.collectives) == sent(real.collectives)
    assert plan.cost.matrix_flops == real.flops
    assert plan.cost.memory.temporaries == pytest.approx(real.temp_bytes, rel=0.12, abs=512)


@pytest.mark.parametrize(
    ("name", "gathers", "matmuls"),  # libtpu 0.0.42
    [("elementwise", [ROUNDS], ROUNDS), ("matmul", [1, ROUNDS], ROUNDS + 1), ("added", [], 0)],
)
def test_loop_invariants_on_tpu_stay_where_they_grow(name, gathers, matmuls):
    size = S((512, 512), "float32")
    plan = shardfn.plan(BODIES[name], size, size, in_strategy=(ROWS, ROWS), device="tpu-v5e:2x4")
    assert sorted(c.trips for c in plan.collectives) == gathers
    assert plan.cost.matrix_flops == matmuls * 2 * 512**3 // 8


@pytest.mark.parametrize("level", [0, 2])
def test_search_counts_loop_invariants_once(level):
    """What is sent for an invariant of 200 rounds is no more than its gathers."""
    size = S((512, 512), "float32")
    plan = shardfn.plan(looped(lambda h, w: jnp.tanh(h @ (w @ w)), 200), size, size, level=level, device="cpu:8")
    assert plan.cost.bytes_sent <= 2 * 4 * 512**2
    assert plan.cost.matrix_flops <= 1.1 * (200 + 8) * 2 * 512**3 / 8

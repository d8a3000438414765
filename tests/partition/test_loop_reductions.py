"""What accelerators send for a loop: sums that it only accumulates once, gathers of what it does not change in every round."""

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.partition.loop_reductions import loop_accumulations

S = jax.ShapeDtypeStruct
H100, V5E, CPU = "h100:8", "tpu-v5e:2x4", "cpu:8"
N, ROUNDS, ROWS = 512, 16, 128
ONE = N * N * 4
ARGS = S((N, N), "float32"), S((ROUNDS, ROWS, N), "float32")


def summed(w, batches):
    """Gradients of micro-batches, added up."""

    def one(total, x):
        return total + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), None

    return w - 0.1 * jax.lax.scan(one, jnp.zeros_like(w), batches)[0]


def clipped(w, batches):
    """The same, but each round's sum is looked at."""

    def one(total, x):
        total = total + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return total, jnp.max(total)

    total, largest = jax.lax.scan(one, jnp.zeros_like(w), batches)
    return w - 0.1 * total, largest


def recurrent(w, xs):
    return jax.lax.scan(lambda h, x: (jnp.tanh(x + h @ w), None), xs[0], xs)[0]


def twice(w, xs):
    """Two loops read the same weight, and something after them."""
    h = recurrent(w, xs)
    return recurrent(w, xs + h) @ w


def read_twice(w, xs, step=lambda w, h, x: jnp.tanh(x + jnp.tanh(h @ w) @ w)):
    """The gradient of a weight that each step of a recurrence reads twice: the loop adds one part after the other."""

    def loss(w):
        return jnp.sum(jax.lax.scan(lambda h, x: (step(w, h, x), None), xs[0], xs)[0])

    return jax.grad(loss)(w)


def read_twice_again(w, xs):
    """The same, recomputed: each round adds the parts of its own first."""
    return read_twice(w, xs, jax.checkpoint(lambda w, h, x: jnp.tanh(x + jnp.tanh(h @ w) @ w)))


def shared(w, xs):
    """The same of three layers that share it, without a loop."""
    return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(xs[0] @ w) @ w) @ w) ** 2))(w)


def looked_up(w, xs):
    """The gradient of rows that each step looks up."""
    ids = jnp.argmax(xs, -1)

    def loss(w):
        return jnp.sum(jax.lax.scan(lambda h, i: (jnp.tanh(h + w[i]), None), xs[0], ids)[0])

    return jax.grad(loss)(w)


DATA, SHARDED = ((1, 1), (1, 8, 1)), ((8, 1), (1, 8, 1))
REDUCED, GATHERED = 2 * 7 * ONE // 8, 7 * ONE // 8
CASES = [  # function, layout, device, bytes sent as compiled by libtpu 0.0.42 and XLA of JAX 0.10.2
    (summed, DATA, H100, REDUCED),
    (summed, DATA, V5E, REDUCED),
    (summed, DATA, CPU, ROUNDS * REDUCED),
    (clipped, DATA, H100, ROUNDS * REDUCED),
    (read_twice, DATA, H100, 2 * ROUNDS * REDUCED),
    (read_twice_again, DATA, H100, REDUCED),
    (read_twice_again, DATA, V5E, ROUNDS * REDUCED),
    (shared, DATA, H100, REDUCED),
    (shared, DATA, V5E, REDUCED),
    (shared, DATA, CPU, 3 * REDUCED),
    (looked_up, DATA, H100, REDUCED),
    (looked_up, DATA, V5E, REDUCED),
    (recurrent, SHARDED, H100, ROUNDS * GATHERED),
    (recurrent, SHARDED, V5E, ROUNDS * GATHERED // 2),
    (recurrent, SHARDED, CPU, GATHERED),
    (twice, SHARDED, H100, (2 * ROUNDS + 1) * GATHERED),
]
NAMES = [f"{function.__name__}-{device}" for function, _, device, _ in CASES]


def planned(function, layout, device):
    return shardfn.plan(function, *ARGS, in_strategy=layout, out_strategy=None, device=device)


@pytest.mark.parametrize(("function", "layout", "device", "sent"), CASES, ids=NAMES)
def test_what_is_sent(function, layout, device, sent):
    assert planned(function, layout, device).cost.bytes_sent == pytest.approx(sent, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("function", "layout", "device", "sent"), [c for c in CASES if c[2] == H100])
def test_what_gpus_send(cuda, function, layout, device, sent):
    kinds = planned(function, layout, device).verify().to_dict()["compiled"]["kinds"]
    assert sum(both["compiled"]["bytes_sent"] for both in kinds.values()) == pytest.approx(sent, rel=1e-3)


@pytest.mark.tpu
@pytest.mark.parametrize(("function", "layout", "device", "sent"), [c for c in CASES if c[2] == V5E])
def test_what_tpus_send(function, layout, device, sent):
    pytest.importorskip("libtpu")
    kinds = planned(function, layout, device).verify().to_dict()["compiled"]["kinds"]
    assert sum(both["compiled"]["bytes_sent"] for both in kinds.values()) == pytest.approx(sent, rel=1e-3)


def test_what_is_accumulated():
    for function, found in ((summed, 1), (clipped, 0), (recurrent, 0)):
        assert len(loop_accumulations(planned(function, DATA, CPU).partitioned.graph)) == found, function


def test_what_is_added_before_it_is_reshaped_is_added_along_its_own_dimensions():
    x, w = jax.ShapeDtypeStruct((8, 32), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    plan = shardfn.plan(lambda x, w: (x @ w).reshape(-1) + (jnp.sin(x) @ w).reshape(-1), x, w,
                        in_strategy=((1, 8), (8, 1)), device=H100)  # fmt: skip
    graph = plan.partitioned.graph
    (add,) = [op for op in graph.ops if op.name == "add"]
    assert {graph.values[v].shape for v in add.inputs} == {(8, 16)} and add.rule and add.rule.sizes == (8, 16)


@pytest.mark.slow
def test_the_search_counts_rounds():
    """Of an LSTM, whose weights every step reads, data parallel is the least on accelerators: gathers would be made in each
    step, and the gradients' sums are not."""

    def step(params, xs):
        def loss(p):
            def cell(carry, x):
                h, s = carry
                i, f, o, g = jnp.split(x @ p["w"] + h @ p["u"] + p["b"], 4, -1)
                s = jax.nn.sigmoid(f) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
                return (jax.nn.sigmoid(o) * jnp.tanh(s), s), None

            zero = jnp.zeros((xs.shape[1], p["u"].shape[0]))
            return jnp.mean(jax.lax.scan(cell, (zero, zero), xs)[0][0] ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {"w": S((128, 512), "float32"), "u": S((128, 512), "float32"), "b": S((512,), "float32")}
    args = params, S((32, 64, 128), "float32")
    replicated = {"w": (1, 1), "u": (1, 1), "b": (1,)}
    for device in (H100, V5E):
        batch = shardfn.plan(step, *args, in_strategy=(replicated, (1, 8, 1)), device=device)
        assert batch.cost.bytes_sent == pytest.approx(2 * 7 / 8 * 4 * (2 * 128 * 512 + 512), rel=1e-3)
        for level in (0, 2):
            found = shardfn.plan(step, *args, device=device, level=level)
            assert found.cost.bytes_sent <= batch.cost.bytes_sent
            assert found.cost.time_s <= batch.cost.time_s

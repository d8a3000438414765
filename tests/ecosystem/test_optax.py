"""optax: losses, and updates of optimizers."""

import jax
import jax.numpy as jnp
import optax

from tests.ecosystem.rows import Row, check, integers, normal, table


def loss(fn, *args):
    return lambda: Row(fn, args, batch=tuple(range(len(args))))


def update(make):
    def build():
        params = {"w": normal(32, 64), "b": normal(64)}
        optimizer = make()
        state = optimizer.init(params)

        def step(params, state, x):
            grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return Row(step, (params, state, normal(64, 32)), batch=(2,), gradient=False)

    return build


def all_pairs(x, y):
    return optax.losses.cosine_similarity(x[:, None], y[None])


ROWS = {
    "softmax_cross_entropy": loss(
        optax.softmax_cross_entropy_with_integer_labels, normal(64, 128), integers(128, 64)
    ),
    "huber_loss": loss(optax.huber_loss, normal(64, 32), normal(64, 32, seed=1)),
    "cosine_similarity of all pairs": loss(all_pairs, normal(64, 32), normal(64, 32, seed=1)),
    "ntxent": loss(optax.losses.ntxent, normal(64, 32), integers(8, 64)),
    "ctc_loss": lambda: Row(
        lambda logits, labels: optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape)),
        (normal(8, 16, 12), 1 + integers(11, 8, 5)), batch=(0, 1),
    ),
    "adamw": update(lambda: optax.adamw(1e-2)),
    "adafactor": update(lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    "clipped sgd": update(lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))),
    "lion": update(lambda: optax.lion(1e-3)),
    "muon": update(lambda: optax.contrib.muon(1e-2)),
}  # fmt: skip


@table(__name__, ROWS)
def test_optax_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

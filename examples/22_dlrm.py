"""DLRM: eight categorical fields of different sizes, users in a table on the host, on clicks that follow a rule.

The fields' rows are one table that is split unevenly: each of the eight devices has all rows of one field, and looks it up
without communication. The users' table stays in host memory; a step sees the rows of its batch. The losses equal those of one
device that holds both tables in full.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import embedding, train

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

FIELDS = (1500, 1200, 1000, 800, 700, 500, 300, 120)  # rows of each field
USERS, WIDTH, BATCH, STEPS = 50_000, 8, 256, 40

rule = np.random.default_rng(0)
TASTES = [rule.normal(size=n) for n in FIELDS]
split = embedding.UnevenRows(FIELDS, offsets=(0,) * len(FIELDS))  # ids start at 0 in each field


def batches():
    """Dense features, an id for each field, users, and whether they clicked."""
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        x = rng.normal(size=(BATCH, 4)).astype("float32")
        ids = np.stack([np.minimum(rng.zipf(1.4, BATCH) - 1, n - 1) for n in FIELDS], -1).astype("int32")
        users = np.minimum(rng.zipf(1.2, BATCH) - 1, USERS - 1).astype("int32")
        score = sum(taste[column] for taste, column in zip(TASTES, ids.T, strict=True)) + x[:, 0] + np.sin(users)
        clicked = rng.uniform(size=BATCH) < 1 / (1 + np.exp(-score))
        yield x, ids, users, clicked.astype("float32")


def make():
    rng = np.random.default_rng(2)
    draw = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[0])).astype("float32")  # noqa: E731
    vectors = len(FIELDS) + 2  # the fields, the user and the dense features
    return {
        "fields": (0.3 * rng.normal(size=(sum(FIELDS), WIDTH))).astype("float32"),
        "bottom": [draw(4, 32), draw(32, WIDTH)],
        "top": [draw(WIDTH + vectors * (vectors - 1) // 2, 64), draw(64, 1)],
    }


def mlp(x, layers):
    for w in layers[:-1]:
        x = jax.nn.relu(x @ w)
    return x @ layers[-1]


def model(params, looked_up, x, users, clicked):
    """The loss, from the rows of the fields [batch, fields, width]."""
    dense = mlp(x, params["bottom"])
    vectors = jnp.concatenate([looked_up, params["users"][users][:, None], dense[:, None]], 1)
    pairs = jnp.einsum("bnd,bmd->bnm", vectors, vectors)[:, *np.triu_indices(vectors.shape[1], 1)]
    scores = mlp(jnp.concatenate([dense, pairs], -1), params["top"])[:, 0]
    return optax.sigmoid_binary_cross_entropy(scores, clicked).mean()


# On eight devices.
first, (x, ids, users, clicked) = make(), next(batches())
table = split.pack(first["fields"])
placed = embedding.placement((8, 1), split, table.shape, ids.shape)


def loss(params, x, ids, users, clicked):
    rows = embedding.lookup(params["fields"], ids, strategy=placed.shardings[0], rows=split)
    return model(params, rows, x, users, clicked)


host = embedding.Table(USERS, WIDTH, cache_rows=1024, optimizer=embedding.adagrad(0.1), init=0.1)
step = train.step(
    loss, optax.adagrad(0.1), ids={"users": 2}, mode="semi_auto_parallel", device=placed.mesh,
    in_strategy=((8, 1), (1, 8), (8,), (8,)), parameter_plan={"fields": (8, 1, 1)},
)  # fmt: skip
users_at_first = host.values()
state, losses = step.init({**first, "fields": table, "users": host}, x, ids, users, clicked), []
for batch in step.feed(batches()):  # reads the next batch's users while a step runs
    state, value = step(state, batch)
    losses.append(float(value))

print("fields:", split.memory_text(WIDTH))
moments = jax.tree.leaves(state.opt_state)
print("on each device:", state.params["fields"].sharding.shard_shape(table.shape), "of the fields,",
      f"{host.device_bytes:,} B of the users")  # fmt: skip
assert any(m.shape == table.shape and m.sharding.shard_shape(m.shape)[0] == 1 for m in moments), "moments are there too"
sent = step.plan(state, x, ids, users, clicked).collectives
print("collectives:", ", ".join(sorted({c.kind for c in sent})), f"{sum(c.total_bytes for c in sent):,} B in a step")
found = embedding.compare(split, WIDTH, ids.shape, strategy=(8, 1))
print(
    f"the fields' lookup and gradient send {found.uneven.sent_in_training:,} B; split evenly {found.even.sent_in_training:,} B"
)


# On one device, with both tables in full.
def loss_alone(params, x, ids, users, clicked):
    return model(params, params["fields"][ids + np.array(split.starts)], x, users, clicked)


alone = train.step(loss_alone, optax.adagrad(0.1), mode="stand_alone")
one, same = alone.init({**first, "users": users_at_first}), []
for batch in batches():
    one, value = alone(one, *batch)
    same.append(float(value))
np.testing.assert_allclose(losses, same, rtol=2e-3)
np.testing.assert_allclose(split.unpack(np.asarray(state.params["fields"])), one.params["fields"], rtol=2e-2, atol=2e-3)
np.testing.assert_allclose(host.values(), one.params["users"], rtol=2e-2, atol=2e-3)
assert np.mean(losses[-10:]) < np.mean(losses[:5]) - 0.05, "it learns the rule"
print(f"the same losses on one device, {np.mean(same[:5]):.4f} -> {np.mean(same[-10:]):.4f}")

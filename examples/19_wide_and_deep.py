"""Wide and deep: a click model whose embedding table is sharded by rows, on clicks that follow a rule.

The table has a row for each item and holds most of the parameters; each of the eight devices keeps an eighth of the rows, and
of the optimizer's two moments. The wide part has a weight for each pair of an item and a group of users, hashed.

At the end the table is on the host: the devices hold the rows of a batch and a cache of the items that are seen most.
"""

import collections
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import embedding, train

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

ITEMS, GROUPS, WIDTH, CROSSES, BATCH, STEPS = 4096, 32, 16, 8192, 512, 80

rule = np.random.default_rng(0)
TASTE = rule.normal(size=(GROUPS, 4))  # what each group of users likes
STYLE = rule.normal(size=(ITEMS, 4))  # and what each item is like


def clicks(rng):
    """Users' groups, ages and the items they saw, most of them popular ones; whether they clicked."""
    group = rng.integers(0, GROUPS, BATCH)
    item = np.minimum(rng.zipf(1.3, BATCH) - 1, ITEMS - 1)
    age = rng.uniform(-1, 1, BATCH)
    score = 1.5 * (TASTE[group] * STYLE[item]).sum(-1) + np.sin(3 * age)
    clicked = rng.uniform(size=BATCH) < 1 / (1 + np.exp(-score))
    cross = (group * 2654435761 + item * 40503) % CROSSES
    ids = np.stack([group, item, cross], -1).astype(np.int32)
    return ids, age[:, None].astype(np.float32), clicked.astype(np.float32)


def make():
    k1, k2, k3, k4 = jax.random.split(jax.random.key(0), 4)
    return {
        "items": 0.1 * jax.random.normal(k1, (ITEMS, WIDTH)),
        "groups": 0.1 * jax.random.normal(k2, (GROUPS, WIDTH)),
        "wide": jnp.zeros(CROSSES),
        "deep": [
            {"w": jax.random.normal(k3, (3 * WIDTH + 1, 64)) / 7, "b": jnp.zeros(64)},
            {"w": jax.random.normal(k4, (64, 1)) / 8, "b": jnp.zeros(1)},
        ],
    }


def loss(params, ids, age, clicked):
    group, item = params["groups"][ids[:, 0]], params["items"][ids[:, 1]]
    hidden = jnp.concatenate([group, item, group * item, age], -1)
    for i, layer in enumerate(params["deep"]):
        hidden = hidden @ layer["w"] + layer["b"]
        hidden = jax.nn.relu(hidden) if i == 0 else hidden
    scores = hidden[:, 0] + params["wide"][ids[:, 2]]
    right = ((scores > 0) == (clicked > 0.5)).astype(jnp.float32)
    return optax.sigmoid_binary_cross_entropy(scores, clicked).mean(), right


def run(**options):
    step = train.step(loss, optax.adam(1e-2), has_aux=True, **options)
    rng = np.random.default_rng(1)
    state, losses = step.init(make, *clicks(rng)), []
    for i in range(STEPS):
        batch = clicks(rng)
        state, (value, right) = step(state, *batch)
        losses.append(float(value))
        if len(options) > 1 and (i + 1) % 20 == 0:
            print(f"step {i + 1:3}  loss {np.mean(losses[-20:]):.4f}  right {float(right.mean()):.0%}")
    return step, state, batch, losses


step, state, batch, losses = run(mode="semi_auto_parallel", parameter_plan={"items": (8, 1), "wide": (8,)})
print()
for path in ("params/items", "opt_state/0/mu/items", "params/wide", "params/deep/0/w"):
    row = step.plan(state, *batch).decision(f"state/{path}")
    print(f"{path:22} {row.shape!s:14} sharded {row.strategy!s:8} {row.local_bytes:>8,} B on each device")
kinds = collections.Counter(row["kind"] for row in step.explain(state, *batch).to_dict()["collectives"])
print("collectives of a step:", ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())))

table = state.params["items"]
assert table.sharding.shard_shape(table.shape) == (ITEMS // 8, WIDTH)
assert state.opt_state[0].mu["items"].sharding.is_equivalent_to(table.sharding, 2)
*_, alone = run(mode="stand_alone")
np.testing.assert_allclose(losses, alone, rtol=2e-3)
assert np.mean(losses[-20:]) < np.mean(losses[:5]) - 0.05, "it learns the rule"
print(f"\nthe same losses on one device, {np.mean(alone[:5]):.4f} -> {np.mean(alone[-20:]):.4f}")


# The items on the host. Their rows have an optimizer of their own, which updates the rows of a batch alone.
def batches():
    rng = np.random.default_rng(1)
    clicks(rng)
    for _ in range(STEPS // 3):
        yield clicks(rng)


params = jax.jit(make)()
items = embedding.Table(
    ITEMS, WIDTH, cache_rows=1024, optimizer=embedding.adagrad(0.1), init=np.asarray(params["items"])
)
step = train.step(loss, optax.adam(1e-2), ids={"items": (0, 1)}, has_aux=True, mode="data_parallel")
state, losses = step.init({**params, "items": items}, *next(batches())), []
for batch in step.feed(batches()):  # reads the next batch's rows while a step runs
    state, (value, _) = step(state, batch)
    losses.append(float(value))

# The same on devices, where the optimizer goes over all rows.
kinds = optax.multi_transform(
    {"items": optax.adagrad(0.1), "rest": optax.adam(1e-2)},
    lambda tree: {k: "items" if k == "items" else "rest" for k in tree},
)
dense = train.step(loss, kinds, has_aux=True, mode="stand_alone")
state, alone = dense.init(make), []
for batch in batches():
    state, (value, _) = dense(state, *batch)
    alone.append(float(value))
np.testing.assert_allclose(losses, alone, rtol=2e-3)
np.testing.assert_allclose(items.values(), state.params["items"], rtol=2e-2, atol=2e-3)
share = items.cache.hits / (items.cache.hits + items.cache.misses)
print(
    f"\nitems on the host: {items.device_bytes:,} B of them in the cache, which has {share:.0%} of the rows of a batch"
)
print(f"the same losses as with all rows on a device, {np.mean(alone[:5]):.4f} -> {np.mean(alone[-20:]):.4f}")

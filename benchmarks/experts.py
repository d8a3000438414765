"""What does expert parallelism send? Dispatch against propagation, a hand-written version, and the lower bound.

One layer of experts with its gradients, tokens and experts sharded over the same 8 devices. The rows with a capacity are one
function, and so are the dropless ones. The bound is what any all-to-all sends: each of `tokens x k` rows of one device goes to
one of 8 devices, comes back, and does both once more for the gradients. Times are medians, rows in turn; on virtual devices
they tell computations apart and not links.
Run: python benchmarks/experts.py [--tokens 2048] [--width 256] [--rounds 5] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardfn
from benchmarks import harness
from examples.models import moe
from shardfn import experts
from shardfn.compiled.executable import read

COLUMNS = ("layer", "predicted KiB", "compiled KiB", "of bound", "ms", "error")
DEVICES, EXPERTS, K = 8, 16, 2


def capacity_of(tokens: int) -> int:
    """Tokens that an expert takes of each group, of which there are as many as devices."""
    return K * tokens // DEVICES // EXPERTS


def ffn(dot, rows, p):
    return dot(jax.nn.gelu(dot(rows, p["w1"])), p["w2"])


def dispatched(p, x, layout, capacity_factor=None, alltoall=True):
    """`experts.dispatch`."""
    routing = experts.route(x @ p["gate"], K, capacity_factor=capacity_factor, groups=DEVICES)
    sent = experts.dispatch(x, routing, layout=layout, alltoall=alltoall)
    return experts.combine(ffn(sent.dot, sent.rows, p), sent)


def einsums(p, x, capacity):
    """GShard's einsums, which XLA partitions by itself."""
    return moe.forward(p, x.reshape(DEVICES, -1, x.shape[-1]), capacity).reshape(x.shape)


def ragged(p, x):
    """A sort of all choices and `ragged_dot`, which XLA partitions by itself."""
    routing = experts.route(x @ p["gate"], K)
    order = jnp.argsort(routing.experts.ravel(), stable=True)
    dot = lambda rows, w: lax.ragged_dot(rows, w, routing.load)  # noqa: E731
    y = ffn(dot, x[order // K], p)
    return jnp.zeros_like(x).at[order // K].add(y * routing.weights.ravel()[order, None])


def by_hand(p, x, mesh, capacity):
    """The same einsums in a `jax.shard_map`, with the two all-to-alls written out."""

    def local(p, x):
        combine = moe.route(jax.nn.softmax(x @ p["gate"])[None], capacity)[0]
        inputs = jnp.einsum("tec,tm->ecm", (combine > 0).astype(x.dtype), x)
        inputs = lax.all_to_all(inputs, "devices", 0, 1, tiled=True)
        outputs = ffn(functools.partial(jnp.einsum, "ecm,emh->ech"), inputs, p)
        return jnp.einsum("tec,ecm->tm", combine, lax.all_to_all(outputs, "devices", 1, 0, tiled=True))

    rows = PartitionSpec("devices")
    specs = {"gate": PartitionSpec(), "w1": rows, "w2": rows}
    return jax.shard_map(local, mesh=mesh, in_specs=(specs, rows), out_specs=rows)(p, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    args = harness.parse(parser, devices=DEVICES)
    mesh = jax.make_mesh((DEVICES,), ("devices",), (AxisType.Auto,))
    layout, capacity = NamedSharding(mesh, PartitionSpec("devices")), capacity_of(args.tokens)
    params = moe.init(jax.random.key(0), EXPERTS, args.width, 2 * args.width)
    x = jax.random.normal(jax.random.key(1), (args.tokens, args.width))
    bound = 4 * (args.tokens // DEVICES) * K * args.width * 4 * (DEVICES - 1) // DEVICES
    layers = {
        "capacity: einsums, propagated": functools.partial(einsums, capacity=capacity),
        "capacity: einsums, all-to-all by hand": functools.partial(by_hand, mesh=mesh, capacity=capacity),
        "capacity: dispatch by all-to-all": functools.partial(dispatched, layout=layout, capacity_factor=1.0),
        "capacity: dispatch by gather": functools.partial(
            dispatched, layout=layout, capacity_factor=1.0, alltoall=False
        ),
        "dropless: ragged_dot, propagated": ragged,
        "dropless: dispatch by padded all-to-all": functools.partial(dispatched, layout=layout),
        "dropless: dispatch by gather": functools.partial(dispatched, layout=layout, alltoall=False),
    }
    strategies = {"gate": (1, 1), "w1": (DEVICES, 1, 1), "w2": (DEVICES, 1, 1)}
    runs, rows, wanted = {}, [], {}
    for name, layer in layers.items():
        step = jax.value_and_grad(lambda p, x, layer=layer: (layer(p, x) ** 2).mean(), (0, 1))
        sharded = shardfn.shard(
            step, in_strategy=(strategies, (DEVICES, 1)), out_strategy=((), (strategies, (DEVICES, 1)))
        )
        plan = sharded.plan(params, x)
        compiled = read(sharded.lower(params, x).compile())
        sent = sum(c.total_bytes for c in compiled.collectives)
        found = jax.tree.leaves(sharded(params, x))
        kind = name.partition(":")[0]
        if kind not in wanted:
            wanted[kind] = jax.tree.leaves(jax.jit(step)(params, x))
        pairs = zip(found, wanted[kind], strict=True)
        error = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
        runs[name] = sharded, []
        values = (name, plan.cost.bytes_sent / 1024, sent / 1024, sent / bound, 0.0, f"{error:.0e}")
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    for _ in range(args.rounds):
        for sharded, times in runs.values():
            begun = time.perf_counter()
            jax.block_until_ready(sharded(params, x))
            times.append(time.perf_counter() - begun)
    for row in rows:
        row["ms"] = 1e3 * float(np.median(runs[row["layer"]][1]))
    title = (f"{args.tokens} tokens of width {args.width}, {EXPERTS} experts, k = {K}, on {DEVICES} devices; "
             f"bound {bound / 1024:,.0f} KiB per device")  # fmt: skip
    harness.show(rows, title)
    harness.save(args.json, {"layers": rows}, notes=[title])


if __name__ == "__main__":
    main()

"""What does a lookup in an embedding table cost: split evenly or unevenly over devices, on the host, or cached?

Lookups at three skews of ids: the even split is `table[ids]` with a NamedSharding, as written by hand; bytes sent are those
of the partitioned program, bytes from the host are counted. Training: rows per second of the host store with and without
prefetch and cache once it is warm, and of two parameter servers in this process with their logs on disk, beside a loop
written by hand (unique ids, NumPy rows, no overlap); the step sleeps as long as an accelerator would compute, so that the
two cores do not matter. Last, the largest table that is trained under a limit of device memory, which holds the cache and
what XLA compiled for the step.
Run: python benchmarks/embedding.py [--rows 400000] [--width 32] [--batch 1024] [--rounds 60] [--device-ms 10]
     [--limit-mib 256] [--gib 1] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import shutil
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import harness
from shardfn import cluster, embedding

FIELDS = 8
SKEWS = {"uniform": None, "zipf 1.1": 1.1, "zipf 1.5": 1.5}


def field_rows(total: int) -> tuple[int, ...]:
    """Fields of different sizes, as those of click models: the largest has half of the rows."""
    small = [total // 2**i for i in range(1, FIELDS)]
    return (*small, total - sum(small))


def draw(random, skew, rows: tuple[int, ...], batch: int) -> np.ndarray:
    """Ids [batch, fields], each from its field's rows."""
    first = np.cumsum([0, *rows[:-1]])
    columns = [
        o + (random.integers(0, n, batch) if skew is None else (random.zipf(skew, batch) - 1) % n)
        for o, n in zip(first, rows, strict=True)
    ]
    return np.stack(columns, 1).astype(np.int32)


def median_ms(calls) -> float:
    """The median time of the second half of some calls: the first ones compile, and warm a cache."""
    times = []
    for call in calls:
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[len(times) // 2 :])


def lookups(options: argparse.Namespace) -> list[dict]:
    """One row for each kind of table and skew."""
    rows, width, batch = field_rows(options.rows), options.width, options.batch
    split, shape = embedding.UnevenRows(rows), (batch, FIELDS)
    values = np.random.default_rng(0).standard_normal((split.total, width), np.float32)
    placed = embedding.placement((FIELDS, 1), split, values.shape, shape)
    uneven = jax.jit(lambda t, i: embedding.lookup(t, i, strategy=placed.shardings[0], rows=split))
    packed = jax.device_put(split.pack(values), placed.shardings[0])
    by_rows = NamedSharding(placed.mesh, PartitionSpec("rows"))
    even_rows = -(-split.total // FIELDS) * FIELDS
    even_table = jax.device_put(np.resize(values, (even_rows, width)), by_rows)
    out = NamedSharding(placed.mesh, PartitionSpec(None, "rows"))
    even = jax.jit(lambda t, i: t.at[i].get(mode="promise_in_bounds"), out_shardings=out)
    cost = embedding.compare(split, width, shape, strategy=(FIELDS, 1))
    host = embedding.Table(split.total, width, init=values)
    found = []
    print(f"{split.total:,} rows of {width} float32 in {FIELDS} fields, batch {batch}, 8 devices; padding "
          f"{split.memory_text(width)}")  # fmt: skip
    for name, skew in SKEWS.items():
        random = np.random.default_rng(1)
        drawn = [draw(random, skew, rows, batch) for _ in range(options.rounds)]
        on_devices = [jax.device_put(ids, placed.shardings[1]) for ids in drawn]
        unique = statistics.mean(len(np.unique(ids)) for ids in drawn)
        cached = embedding.Table(split.total, width, init=values, cache_rows=4 * batch * FIELDS)

        def show(kind: str, ms: float, kept: int, sent: int = 0, moved: float = 0.0, name=name, unique=unique) -> None:
            found.append({"ids": name, "table": kind, "different ids": round(unique), "B kept on a device": kept,
                          "B sent": sent, "B from the host": round(moved), "ms": ms})  # fmt: skip

        ms = median_ms(lambda i=i: even(even_table, i) for i in on_devices)
        show("even, by hand", ms, even_table.nbytes // 8, cost.even.sent)
        show(
            "uneven", median_ms(lambda i=i: uneven(packed, i) for i in on_devices), packed.nbytes // 8, cost.uneven.sent
        )
        show("host", median_ms(lambda i=i: host.lookup(i) for i in drawn), 0, 0, unique * width * 4)
        early, late = drawn[: options.rounds // 2], drawn[options.rounds // 2 :]
        median_ms(lambda i=i, t=cached: t.lookup(i) for i in early)
        misses = cached.cache.misses
        ms = median_ms(lambda i=i, t=cached: t.lookup(i) for i in late)
        moved = (cached.cache.misses - misses) / len(late) * width * 4 * 2  # a row and its moment
        show("host, cache", ms, cached.device_bytes, 0, moved)
    harness.show(found)
    return found


def train_rows(options: argparse.Namespace) -> list[dict]:
    """Rows per second through fetch, step and update by hand, and those of each store as a share of that."""
    width, batch, total = options.width, options.batch, options.rows

    def device(x):
        time.sleep(options.device_ms / 1e3)
        return x

    @jax.jit
    def gradient(values, positions):
        values = jax.pure_callback(device, jax.ShapeDtypeStruct(values.shape, values.dtype), values)
        return jax.grad(lambda v: jnp.mean(v[positions] ** 2))(values)

    def by_hand(ids) -> float:
        rows = np.random.default_rng(0).standard_normal((total, width), np.float32)
        squares, start = np.full_like(rows, 0.1), 0.0
        for number, one in enumerate(ids):
            start = time.perf_counter() if number == len(ids) // 3 else start
            unique, inverse = np.unique(one, return_inverse=True)
            size = 1 << (len(unique) - 1).bit_length()
            values = np.zeros((size, width), np.float32)
            values[: len(unique)] = rows[unique]
            g = np.asarray(gradient(values, inverse.reshape(one.shape)))[: len(unique)]
            squares[unique] += g * g
            rows[unique] -= 0.01 * g / np.sqrt(squares[unique] + 1e-7)
        return time.perf_counter() - start

    def by_table(ids, prefetch: bool, cache_rows: int, path, on_servers: bool) -> float:
        servers = cluster.TableServers(servers=2, folder=tempfile.mkdtemp(dir=folder)) if on_servers else None
        table = embedding.Table(total, width, store=servers or "host", path=path, cache_rows=cache_rows, init=1.0)
        start = 0.0
        for number, one in enumerate(table.prefetch(ids) if prefetch else map(table.fetch, ids)):
            start = time.perf_counter() if number == len(ids) // 3 else start
            table.update(one, gradient(one.values, one.positions))
        jax.block_until_ready(table.lookup(ids[-1]))  # what the last update changed, which may still run
        seconds = time.perf_counter() - start
        if servers is not None:
            servers.server.close()
            shutil.rmtree(str(servers.folder))
        return seconds

    found = []
    extras = {"plain": (False, 0), "cache": (False, 4 * batch * FIELDS), "prefetch": (True, 0),
              "both": (True, 4 * batch * FIELDS)}  # fmt: skip
    stores = {"host": (None, False), "file": (True, False), "servers": (None, True)}
    with tempfile.TemporaryDirectory() as folder:
        for name, skew in SKEWS.items():
            random = np.random.default_rng(2)
            ids = [draw(random, skew, field_rows(total), batch) for _ in range(options.rounds)]
            ways = {("by hand", ""): functools.partial(by_hand, ids)}
            for (store, (on_disk, on_servers)), (extra, (prefetch, cache)) in itertools.product(
                stores.items(), extras.items()
            ):
                path = folder if on_disk else None
                ways[store, extra] = functools.partial(by_table, ids, prefetch, cache, path, on_servers)
            counted = sum(one.size for one in ids[len(ids) // 3 :])
            seconds = {key: min(way(), way()) for key, way in ways.items()}  # the first call compiles
            for _ in range(2):  # in turns: what else the machine does meets all of them
                seconds = {key: min(seconds[key], way()) for key, way in ways.items()}
            hand = seconds["by hand", ""]
            found += [
                {"ids": name, "by hand, rows/s": counted / hand, "store": store,
                 **{extra: hand / seconds[store, extra] for extra in extras}}
                for store in stores
            ]  # fmt: skip
    harness.show(found)
    return found


def largest(options: argparse.Namespace) -> list[dict]:
    """A table of as many gigabytes as asked, trained under the limit; and the largest that fits the device."""
    width, batch, limit = options.width, options.batch, options.limit_mib << 20
    row = width * 4
    dense = limit // (3 * row)  # rows, a moment and a gradient
    total = int(options.gib * 2**30) // (2 * row)
    with tempfile.TemporaryDirectory() as folder:
        table = embedding.Table(total, width, path=folder, cache_rows=4 * batch * FIELDS, init=0.01)
        step = jax.jit(jax.grad(lambda v, p: jnp.mean(v[p] ** 2)))
        random, start = np.random.default_rng(0), time.perf_counter()
        ids = [random.integers(0, total, (batch, FIELDS)) for _ in range(options.rounds)]
        for one in table.prefetch(ids, capacity=batch * FIELDS):
            table.update(one, step(one.values, one.positions))
        seconds = time.perf_counter() - start
        memory = step.lower(one.values, one.positions).compile().memory_analysis()
        peak = (
            memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes + table.device_bytes
        )
    assert peak < limit, f"{peak:,} bytes on the device"
    found = {"limit MiB": options.limit_mib, "rows of a table on the device": dense, "rows trained": total,
             "GiB with moments": options.gib, "B on the device": peak,
             "rows/s": batch * FIELDS * len(ids) / seconds}  # fmt: skip
    harness.show([found])
    return [found]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device-ms", type=float, default=10)
    parser.add_argument("--limit-mib", type=int, default=256)
    parser.add_argument("--gib", type=float, default=1)
    options = harness.parse(parser, devices=8)
    found = {"lookups": lookups(options), "training": train_rows(options), "largest": largest(options)}
    harness.save(options.json, found)


if __name__ == "__main__":
    main()

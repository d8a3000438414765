"""How true is the prediction? Collectives, bytes, memory and FLOPs of a plan beside what XLA compiles for 8 devices.

Each row is one program under one layout, good ones and deliberately bad ones. Loops are multiplied on both sides. Bytes
are what one device sends; a ratio is predicted over compiled. Nothing is run: the programs are planned and compiled.
Run: python benchmarks/truth.py [--only TEXT ...] [--quick] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import shardfn
from benchmarks import harness
from examples.models import (
    abstract,
    attention,
    batchnorm,
    cholesky,
    convnet,
    decoder,
    embedding,
    gpt2,
    mlp,
    moe,
    stencil,
)
from shardfn import compiled
from shardfn.cost.collectives import COLLECTIVE_KINDS
from shardfn.cost.compute import op_flops
from shardfn.planning.plan import Plan

DEVICES = 8

# ---- programs that examples/ has not


def matmul(x, w):
    return x @ w


def scanned(params, x):
    """Equal layers by scan: x [batch, d], w1 [layers, d, h], w2 [layers, h, d]."""

    def layer(x, p):
        return x + jnp.tanh(x @ p["w1"]) @ p["w2"], None

    return jax.lax.scan(layer, x, params)[0]


def scanned_step(params, x):
    grads = jax.grad(lambda p: jnp.mean(scanned(p, x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def iterated(x, w):
    """Each round reads the exponentials and the square of w, which no round changes: x [batch, d], w [d, d]."""
    return jax.lax.fori_loop(0, 20, lambda i, h: jnp.tanh(h @ jnp.exp(w) + h @ (w @ w)), x)


def transported(x, y):
    """Sinkhorn's iterations between the rows of x [n, d] and y [m, d], whose distances each round computes."""

    def body(i, scalings):
        u, v = scalings
        kernel = jnp.exp(x @ y.T - jnp.sum(x**2, 1)[:, None] / 2 - jnp.sum(y**2, 1) / 2)
        u = 1.0 / (kernel @ v)
        return u, 1.0 / (kernel.T @ u)

    return jax.lax.fori_loop(0, 40, body, (jnp.ones(x.shape[0]), jnp.ones(y.shape[0])))


def running_sums(x):
    return jnp.cumsum(x, axis=1)


def ordered(x):
    return jnp.sort(x, axis=1)


def best_four(x):
    return jax.lax.top_k(x, 4)


def spectrum(x):
    return jnp.abs(jnp.fft.rfft(x, axis=1))


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# ---- layouts of whole trees


def cut(dim: int, ways: int = DEVICES) -> Callable[[Any], Any]:
    """Entries that cut `dim` of every array that has it and divides; the rest is whole."""

    def entry(leaf: Any) -> tuple[int, ...]:
        at = dim % max(1, leaf.ndim)
        fits = leaf.ndim > at and -leaf.ndim <= dim and leaf.shape[at] % ways == 0
        return tuple(ways if fits and d == at else 1 for d in range(leaf.ndim))

    return lambda tree: jax.tree.map(entry, tree)


def cut_largest(ways: int = DEVICES) -> Callable[[Any], Any]:
    """Entries that cut the first dim of every array that divides: fully sharded data parallel."""

    def entry(leaf: Any) -> tuple[int, ...]:
        at = next((d for d, n in enumerate(leaf.shape) if n % ways == 0), None)
        return tuple(ways if d == at else 1 for d in range(leaf.ndim))

    return lambda tree: jax.tree.map(entry, tree)


def whole(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (1,) * leaf.ndim, tree)


def named(**entries: tuple[int, ...]) -> Callable[[Any], Any]:
    """Entries by the last part of an array's path; arrays that are not named are whole."""

    def entry(path: Any, leaf: Any) -> tuple[int, ...]:
        name = next((k.key for k in reversed(path) if isinstance(k, jax.tree_util.DictKey)), "")
        found = entries.get(name, ())
        return (*(1,) * (leaf.ndim - len(found)), *found) if leaf.ndim >= len(found) else (1,) * leaf.ndim

    return lambda tree: jax.tree_util.tree_map_with_path(entry, tree)


# ---- the rows


@dataclasses.dataclass(frozen=True)
class Case:
    """One program under one layout. `entries` are what `in_strategy` holds, or functions from an argument to that."""

    program: str
    layout: str
    good: bool
    make: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]
    entries: tuple[Any, ...]
    out: Any = None
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.program}: {self.layout}"


def cases() -> Iterator[Case]:
    """All rows, in the order of the table."""
    for program, make, layouts in TABLE:
        for layout, good, entries, *rest in layouts:
            options = rest[0] if rest else {}
            yield Case(program, layout, good, make, entries, **options)


def simple(fn: Callable[..., Any], *args: Any) -> Callable[[], tuple[Callable[..., Any], Sequence[Any]]]:
    return lambda: (fn, args)


def model(make: Callable[..., Any], *args: Any, **sizes: Any) -> Callable[[], tuple[Callable[..., Any], Sequence[Any]]]:
    return functools.partial(abstract, make, *args, **sizes)


GOOD, BAD = True, False
QUICK = {"quick": True}
MEGATRON = {"wq": (1, 8, 1), "wk": (1, 8, 1), "wv": (1, 8, 1), "wo": (8, 1, 1), "w1": (1, 8), "b1": (8,), "w2": (8, 1)}
HALF = {name: tuple(min(c, 4) for c in cuts) for name, cuts in MEGATRON.items()}
BOTH = {"wq": (2, 4, 1), "wk": (2, 4, 1), "wv": (2, 4, 1), "wo": (4, 1, 2), "w1": (2, 4), "b1": (4,), "w2": (4, 2)}
UNLIKE = {"wq": (8, 1, 1), "wk": (1, 1, 4), "wv": (1, 8, 1), "wo": (1, 1, 8), "w1": (8, 1), "w2": (1, 8)}

LAYERS = {"w1": array(6, 64, 256), "w2": array(6, 256, 64)}
SCAN = {"layers": 4, "scan": True}
WIDE = {"batch": 64, "d_in": 256, "d_hidden": 1024, "d_out": 128}

TABLE: tuple[tuple[str, Callable[[], Any], tuple[Any, ...]], ...] = (
    ("matmul", simple(matmul, array(512, 256), array(256, 1024)), (
        ("rows", GOOD, ((8, 1), (1, 1)), QUICK),
        ("columns", GOOD, ((1, 1), (1, 8))),
        ("contracted", GOOD, ((1, 8), (8, 1)), QUICK),
        ("rows x columns", GOOD, ((2, 1), (1, 4))),
        ("contracted, result in rows", GOOD, ((1, 8), (8, 1)), {"out": ((8, 1),)}),
        ("2 x 2 x 2, all three dims", GOOD, ((2, 2), (2, 2))),
        ("columns, result whole", BAD, ((1, 1), (1, 8)), {"out": ((1, 1),), "quick": True}),
        ("rows, result in columns", BAD, ((8, 1), (1, 1)), {"out": ((1, 8),)}),
        ("rows, and columns of the same devices", BAD, ((8, 1), (1, 8)), QUICK),
        ("contracted on one side only", BAD, ((1, 8), (1, 1))),
    )),
    ("mlp forward", model(mlp.make, **WIDE), (
        ("batch", GOOD, (whole, (8, 1))),
        ("hidden", GOOD, (named(w1=(1, 8), b1=(8,), w2=(8, 1)), (1, 1)), QUICK),
        ("batch 2 x hidden 4", GOOD, (named(w1=(1, 4), b1=(4,), w2=(4, 1)), (2, 1))),
        ("w1 in rows, w2 in columns", BAD, (named(w1=(8, 1), w2=(1, 8)), (1, 1)), QUICK),
    )),
    ("mlp step", model(mlp.make, **WIDE, train=True), (
        ("batch", GOOD, (whole, (8, 1), (8, 1)), QUICK),
        ("hidden", GOOD, (named(w1=(1, 8), b1=(8,), w2=(8, 1)), (1, 1), (1, 1))),
        ("batch 2 x hidden 4", GOOD, (named(w1=(1, 4), b1=(4,), w2=(4, 1)), (2, 1), (2, 1))),
        ("batch, weights in pieces", GOOD, (cut_largest(), (8, 1), (8, 1))),
        ("batch, last dims of weights", BAD, (cut(-1), (8, 1), (8, 1)), QUICK),
        ("features of x and y", BAD, (whole, (1, 8), (1, 8))),
    )),
    ("attention", model(attention.make, batch=8, seq=64, d_model=128, heads=8), (
        ("batch", GOOD, (whole, (8, 1, 1))),
        ("heads", GOOD, (named(**MEGATRON), (1, 1, 1)), QUICK),
        ("batch 2 x heads 4", GOOD, (named(**HALF), (2, 1, 1))),
        ("sequence", BAD, (whole, (1, 8, 1)), QUICK),
        ("d_model", BAD, (whole, (1, 1, 8))),
        ("a different dim of each weight", BAD, (named(**UNLIKE), (1, 1, 1))),
    )),
    ("gpt2 step, 2 layers", model(gpt2.make, gpt2.Config(batch=16)), (
        ("batch", GOOD, (whole, whole, (8, 1)), QUICK),
        ("heads and feed-forward", GOOD, (named(**MEGATRON), named(**MEGATRON), (1, 1))),
        ("batch 2 x heads 4", GOOD, (named(**HALF), named(**HALF), (2, 1))),
        ("batch, weights in pieces", GOOD, (cut_largest(), cut_largest(), (8, 1))),
        ("batch, optimizer in pieces", GOOD, (whole, cut_largest(), (8, 1))),
        ("batch 2 x heads 4, weights in pieces", GOOD, (named(**BOTH), named(**BOTH), (2, 1))),
        ("the same, and the vocabulary", GOOD, (named(**BOTH, tokens=(4, 2)), named(**BOTH, tokens=(4, 2)), (2, 1))),
        ("the same, rows of the table as the batch", GOOD,
         (named(**BOTH, tokens=(2, 1)), named(**BOTH, tokens=(2, 1)), (2, 1))),
        ("vocabulary", GOOD, (named(tokens=(8, 1)), named(tokens=(8, 1)), (1, 1))),
        ("last dims of weights", BAD, (cut(-1), cut(-1), (1, 1))),
        ("a different dim of each weight", BAD, (named(**UNLIKE), named(**UNLIKE), (8, 1))),
    )),
    ("gpt2 step, 4 layers by scan", model(gpt2.make, gpt2.Config(batch=16, **SCAN)), (
        ("batch", GOOD, (whole, whole, (8, 1))),
        ("heads and feed-forward", GOOD, (named(**MEGATRON), named(**MEGATRON), (1, 1))),
        ("batch, weights in pieces", GOOD, (cut(1), cut(1), (8, 1))),
        ("last dims of weights", BAD, (cut(-1), cut(-1), (1, 1))),
    )),
    ("scan forward", simple(scanned, LAYERS, array(64, 64)), (
        ("batch", GOOD, (whole, (8, 1))),
        ("hidden", GOOD, (named(w1=(1, 1, 8), w2=(1, 8, 1)), (1, 1)), QUICK),
        ("w1 in rows, w2 in columns", BAD, (named(w1=(1, 8, 1), w2=(1, 1, 8)), (1, 1))),
    )),
    ("scan step", simple(scanned_step, LAYERS, array(64, 64)), (
        ("batch", GOOD, (whole, (8, 1))),
        ("hidden", GOOD, (named(w1=(1, 1, 8), w2=(1, 8, 1)), (1, 1))),
        ("batch, weights in pieces", GOOD, (cut(1), (8, 1))),
        ("layers", BAD, (whole, (1, 8)), QUICK),
    )),
    ("loop invariants", simple(iterated, array(64, 64), array(64, 64)), (
        ("rows", GOOD, ((8, 1), (8, 1)), QUICK),
        ("batch", GOOD, ((8, 1), (1, 1))),
        ("columns of w", BAD, ((1, 1), (1, 8))),
    )),
    ("sinkhorn", simple(transported, array(128, 16), array(256, 16)), (
        ("rows", GOOD, ((8, 1), (1, 1)), QUICK),
        ("rows of both", GOOD, ((8, 1), (8, 1))),
    )),
    ("convnet forward", model(convnet.make, batch=16, size=32), (
        ("batch", GOOD, (whole, (8, 1, 1, 1))),
        ("channels", GOOD, (named(kernels=(1, 1, 1, 8), biases=(8,), dense=(8, 1)), (1, 1, 1, 1)), QUICK),
        ("height", GOOD, (whole, (1, 8, 1, 1)), QUICK),
        ("height 2 x width 4", GOOD, (whole, (1, 2, 4, 1))),
        ("taps in, channels out", BAD, (named(kernels=(1, 1, 4, 1), dense=(1, 8)), (8, 1, 1, 1))),
    )),
    ("convnet step", model(convnet.make, batch=16, size=32, train=True), (
        ("batch", GOOD, (whole, (8, 1, 1, 1), (8,)), QUICK),
        ("height", GOOD, (whole, (1, 8, 1, 1), (1,))),
        ("channels", BAD, (named(kernels=(1, 1, 1, 8), biases=(8,), dense=(8, 1)), (1, 1, 1, 1), (1,))),
    )),
    ("embedding forward", model(embedding.make, batch=64, tables=8, rows=1024), (
        ("batch", GOOD, (whole, (8, 1), (8, 1))),
        ("tables", GOOD, (named(tables=(8, 1, 1)), (1, 1), (1, 8))),
        ("rows of tables", GOOD, (named(tables=(1, 8, 1)), (1, 1), (1, 1)), QUICK),
        ("rows of tables, batch", BAD, (named(tables=(1, 8, 1)), (8, 1), (8, 1))),
        ("columns of tables", BAD, (named(tables=(1, 1, 8)), (1, 1), (1, 1))),
    )),
    ("embedding step", model(embedding.make, batch=64, tables=8, rows=1024, train=True), (
        ("batch", GOOD, (whole, (8, 1), (8, 1), (8,))),
        ("rows of tables", GOOD, (named(tables=(1, 8, 1)), (1, 1), (1, 1), (1,))),
        ("columns of tables, batch", BAD, (named(tables=(1, 1, 8)), (8, 1), (8, 1), (8,))),
    )),
    ("moe", model(moe.make), (
        ("groups", GOOD, (whole, (8, 1, 1)), QUICK),
        ("experts", GOOD, (named(w1=(8, 1, 1), w2=(8, 1, 1)), (1, 1, 1))),
        ("experts, and groups of the same devices", GOOD, (named(w1=(8, 1, 1), w2=(8, 1, 1)), (8, 1, 1))),
        ("groups 2 x experts 4", GOOD, (named(w1=(4, 1, 1), w2=(4, 1, 1)), (2, 1, 1))),
        ("tokens", BAD, (whole, (1, 8, 1)), QUICK),
        ("hidden of w1, d_model of w2", BAD, (named(w1=(1, 1, 8), w2=(1, 1, 8)), (1, 1, 1))),
    )),
    ("batch norm", model(batchnorm.make, batch=64, d_in=128, d_out=256), (
        ("batch", GOOD, (whole, whole, (8, 1)), QUICK),
        ("features", GOOD, (cut(-1), cut(-1), (1, 1))),
        ("rows of w", BAD, (named(w=(8, 1)), whole, (1, 1))),
    )),
    ("cumsum", simple(running_sums, array(64, 512)), (
        ("rows", GOOD, ((8, 1),)),
        ("along it", BAD, ((1, 8),), QUICK),
    )),
    ("sort", simple(ordered, array(64, 512)), (
        ("rows", GOOD, ((8, 1),)),
        ("along it", BAD, ((1, 8),), QUICK),
    )),
    ("top_k", simple(best_four, array(64, 512)), (
        ("rows", GOOD, ((8, 1),), QUICK),
        ("along it", BAD, ((1, 8),), QUICK),
    )),
    ("fft", simple(spectrum, array(64, 512)), (
        ("rows", GOOD, ((8, 1),)),
        ("along it", BAD, ((1, 8),)),
    )),
    ("stencil, periodic", model(stencil.make, rows=128, columns=128), (
        ("rows", GOOD, ((8, 1), ()), QUICK),
        ("rows 2 x columns 4", GOOD, ((2, 4), ())),
        ("columns", BAD, ((1, 8), ())),
    )),
    ("stencil, zero edges", model(stencil.make, rows=128, columns=128, edges="zero"), (
        ("rows", GOOD, ((8, 1), ()), QUICK),
        ("rows 2 x columns 4", GOOD, ((2, 4), ())),
        ("columns", BAD, ((1, 8), ())),
    )),
    ("cholesky solve", model(cholesky.make, batch=16, n=32), (
        ("batch", GOOD, ((8, 1, 1), (8, 1, 1)), QUICK),
        ("right sides", GOOD, ((1, 1, 1), (1, 1, 8))),
        ("rows of the system", BAD, ((1, 8, 1), (1, 1, 1)), QUICK),
        ("batch, other rows of b", BAD, ((8, 1, 1), (1, 8, 1))),
    )),
    ("decode step", model(decoder.make, length=32), (
        ("batch", GOOD, (whole, named(k=(8, 1, 1, 1), v=(8, 1, 1, 1)), (8,)), QUICK),
        ("heads", GOOD, (named(**MEGATRON), named(k=(8, 1), v=(8, 1)), (1,))),
        ("batch 2 x heads 4", GOOD, (named(**HALF), named(k=(2, 1, 4, 1), v=(2, 1, 4, 1)), (2,))),
        ("length of the cache", BAD, (whole, named(k=(8, 1, 1), v=(8, 1, 1)), (1,)), QUICK),
    )),
    ("generate, 8 tokens", lambda: with_steps(8), (
        ("batch", GOOD, (whole, named(k=(8, 1, 1, 1), v=(8, 1, 1, 1)), (8,))),
        ("heads", GOOD, (named(**MEGATRON), named(k=(8, 1), v=(8, 1)), (1,))),
    )),
)  # fmt: skip


def with_steps(steps: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    _, args = abstract(decoder.make, length=32)
    return functools.partial(decoder.generate, steps=steps), args


# ---- measuring


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. `kinds` holds, for each collective, (predicted, compiled) runs and (…) bytes."""

    program: str
    layout: str
    good: bool
    kinds: dict[str, tuple[tuple[int, int], tuple[int, int]]]
    predicted_bytes: int
    compiled_bytes: int
    arguments_exact: bool
    results_exact: bool
    temporaries: tuple[int, int]
    peak: tuple[int, int]
    flops: tuple[float, float]
    plan_s: float
    compile_s: float

    @property
    def ratio(self) -> float | None:
        """Bytes predicted over compiled; 1 where both send nothing."""
        return _ratio(self.predicted_bytes, self.compiled_bytes)


def _ratio(predicted: float, actual: float) -> float | None:
    if predicted == actual:
        return 1.0
    return predicted / actual if actual else None


def sharded(case: Case) -> tuple[Any, Sequence[Any]]:
    """The case's function, sharded, and its arguments."""
    fn, args = case.make()
    entries = tuple(e(a) if callable(e) else e for e, a in zip(case.entries, args, strict=True))
    return shardfn.shard(fn, entries, case.out), args


def measure(case: Case) -> Row:
    """Plan and compile one case."""
    function, args = sharded(case)
    start = time.perf_counter()
    plan = function.plan(*args)
    middle = time.perf_counter()
    program = function.lower(*args).compile()
    end = time.perf_counter()
    return row(case, plan, compiled.read(program), middle - start, end - middle)


def row(case: Case, plan: Plan, real: compiled.Compiled, plan_s: float, compile_s: float) -> Row:
    """Hold a plan against its compiled program."""
    kinds = {}
    for kind in COLLECTIVE_KINDS:
        sides = [[c for c in side if c.kind == kind] for side in (plan.collectives, real.collectives)]
        if any(sides):
            runs, sent = ([f(side) for side in sides] for f in (_runs, _sent))
            kinds[kind] = tuple(runs), tuple(sent)
    memory, partitioned = plan.cost.memory, plan.partitioned
    work = sum(
        op_flops(partitioned, op) * op.trips
        for op in partitioned.graph.ops
        if op.name in ("dot_general", "convolution")
    )
    # XLA adds a table of pointers where it returns a tuple.
    pointers = 8 * len(plan.outputs)
    return Row(
        case.program, case.layout, case.good, kinds, _sent(plan.collectives), _sent(real.collectives),
        memory.arguments == real.argument_bytes, (real.output_bytes or 0) - memory.results in (0, pointers),
        (memory.temporaries, real.temp_bytes or 0), (memory.peak, real.together(plan.hardware.platform) or 0),
        (work, real.flops), plan_s, compile_s,
    )  # fmt: skip


def _runs(side: Sequence[Any]) -> int:
    return sum(c.trips for c in side)


def _sent(side: Sequence[Any]) -> int:
    return sum(c.total_bytes for c in side)


SHORT = dict(zip(COLLECTIVE_KINDS, ("ar", "ag", "rs", "a2a", "cp"), strict=True))


def columns(row: Row) -> dict[str, str]:
    """A row as text."""

    def show(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    runs = [" ".join(f"{n}{SHORT[k]}" for k, (r, _) in row.kinds.items() if (n := r[side])) for side in (0, 1)]
    return {
        "program": row.program,
        "layout": row.layout,
        "": "good" if row.good else "bad",
        "collectives": runs[0] or "none",
        "compiled": runs[1] or "none",
        "bytes": f"{row.predicted_bytes:,}",
        "compiled bytes": f"{row.compiled_bytes:,}",
        "ratio": show(row.ratio),
        "args": "=" if row.arguments_exact else "no",
        "results": "=" if row.results_exact else "no",
        "temps": show(_ratio(*row.temporaries)),
        "FLOPs": show(_ratio(*row.flops)),
    }


SETS = {GOOD: "shardings that a person would choose", BAD: "deliberately bad shardings"}


def close(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How many rows are how close, for each set."""

    def within(mine: Sequence[Row], bound: float) -> int:
        return sum(_near(_ratio(*r.peak), bound) for r in mine)

    sets = {name: [r for r in rows if r.good == good] for good, name in SETS.items()}
    return [
        {"set": name, "rows": len(mine), "bytes equal": sum(r.predicted_bytes == r.compiled_bytes for r in mine),
         "bytes within 5 %": sum(_near(r.ratio, 0.05) for r in mine),
         "peak within 5 %": within(mine, 0.05), "10 %": within(mine, 0.10), "25 %": within(mine, 0.25),
         "arguments and results exact": sum(r.arguments_exact and r.results_exact for r in mine)}
        for name, mine in (*sets.items(), ("all", list(rows))) if mine
    ]  # fmt: skip


def differences(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows whose bytes differ, or whose peak does by more than a tenth, the furthest first."""
    off = [r for r in rows if r.predicted_bytes != r.compiled_bytes or not _near(_ratio(*r.peak), 0.10)]
    return [
        {"program": r.program, "sharding": r.layout, "bytes predicted": r.predicted_bytes, "compiled": r.compiled_bytes,
         "bytes": r.ratio, "peak": _ratio(*r.peak)}
        for r in sorted(off, key=lambda r: -max(_off(r.ratio), _off(_ratio(*r.peak))))
    ]  # fmt: skip


def _near(ratio: float | None, bound: float) -> bool:
    return ratio is not None and abs(ratio - 1) <= bound


def _off(ratio: float | None) -> float:
    return abs(math.log(ratio)) if ratio else math.inf


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="rows whose name holds one of these")
    parser.add_argument("--quick", action="store_true", help="the subset that the tests hold")
    options = harness.parse(parser, devices=DEVICES)
    rows: list[Row] = []
    for case in cases():
        if (options.quick and not case.quick) or (options.only and not any(t in case.name for t in options.only)):
            continue
        rows.append(measure(case))
        shown = columns(rows[-1])
        if len(rows) == 1:
            print(_line({name: name for name in shown}))
        print(_line(shown), flush=True)
    tables = {"close": close(rows), "differences": differences(rows)}
    for name, table in tables.items():
        if table:
            harness.show(table, f"\n{name}")
    slowest = max(rows, key=lambda r: r.plan_s, default=None)
    if slowest:
        print(
            f"slowest plan: {slowest.program}: {slowest.layout}, {slowest.plan_s:.2f} s, compile {slowest.compile_s:.2f} s"
        )
    harness.save(options.json, {**tables, "rows": [dataclasses.asdict(r) | {"ratio": r.ratio} for r in rows]})


_WIDTHS = (27, 40, 4, 26, 26, 13, 14, 6, 4, 7, 5, 5)


def _line(shown: dict[str, str]) -> str:
    left = 5
    parts = [
        f"{text:<{w}}" if i < left else f"{text:>{w}}"
        for i, (text, w) in enumerate(zip(shown.values(), _WIDTHS, strict=True))
    ]
    return " ".join(parts).rstrip()


if __name__ == "__main__":
    main()

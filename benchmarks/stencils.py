"""Does a program that reads its neighbours, written as people write it, send its halo only, and how fast is it?

Each row is a finite-difference program, an image filter or a cellular automaton of slices, pads, `.at[...]` updates and the like,
sharded from integers over 8 devices. Its bytes are those that the plan predicts and those in the HLO that XLA compiles. The halo
is what one device between others has to receive; `ratio` is compiled over halo, and `values` says whether the result is that of
the unsharded function. `ms` stands beside the same program by hand, with `jnp.roll` and `jnp.where`, through the same `shard`:
the two are called in turn, A B A B, and `time ratio` is the median of the ratios of neighbours. The second table
has their gradients, which may send the halo once each way. The third has the programs of the gallery beside the same with
`jax.shard_map` and `ppermute`: lines of code, bytes and time.
Run: python benchmarks/stencils.py [--only NAME ...] [--rounds N] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shardfn
from benchmarks import harness
from benchmarks.peer_steps import gas, stencils_by_hand
from examples.gallery import stencils as gallery
from shardfn.compiled.executable import read
from shardfn.runtime.verify import compile_plan

DEVICES = 8
STEPS = 4
N = 512
AIM_BYTES, AIM_TIME = 1.2, 1.1
MOST_S = 5.0
"""Seconds that the calls of a program may take."""
Function = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Stencil:
    """A program of one array."""

    written: Function
    by_hand: Function
    reach: tuple[int, ...]
    """Neighbouring elements that a result reads, before and after together, along each dimension."""
    shape: tuple[int, ...] = (N, N)
    strategy: tuple[int, ...] = (8, 1)
    steps: int = 1
    corners: bool = False
    """Whether a result reads along several dimensions at once."""

    @property
    def halo(self) -> int:
        """Bytes that a device between others receives in a call.

        >>> Stencil(jnp.diff, jnp.diff, (1, 2), strategy=(8, 1), steps=4).halo == 4 * 512 * 4
        True
        """
        local = [n // k for n, k in zip(self.shape, self.strategy, strict=True)]
        wide = [r if k > 1 else 0 for r, k in zip(self.reach, self.strategy, strict=True)]
        faces = sum(r * math.prod(local) // n for n, r in zip(local, wide, strict=True))
        wider = math.prod(n + r for n, r in zip(local, wide, strict=True)) - math.prod(local)
        return 4 * self.steps * (wider if self.corners else faces)


# ---- what programs by hand are made of


def at(u, by, dim):
    """Element i + by at place i, around the end."""
    return jnp.roll(u, -by, dim)


def place(u, dim):
    """The positions along a dimension."""
    return lax.broadcasted_iota(np.int32, u.shape, dim)


def inner(u, width=1, dims=None):
    """Where `width` elements or more are on each side."""
    masks = [(place(u, d) >= width) & (place(u, d) < u.shape[d] - width) for d in dims or range(u.ndim)]
    return jnp.stack(masks).all(0) if len(masks) > 2 else masks[0] & masks[-1]


def beyond(u, by, dim, mode="edge"):
    """Element i + by at place i: outside it is zero ("zero"), the last one ("edge") or mirrored ("reflect"); |by| is 1."""
    edge = place(u, dim) == (u.shape[dim] - 1 if by > 0 else 0)
    other = {"zero": jnp.zeros_like(u), "edge": u, "reflect": at(u, -by, dim)}[mode]
    return jnp.where(edge, other, at(u, by, dim))


def around(u, mode):
    """The nine values in the square around each element."""
    rows = [beyond(u, -1, 0, mode), u, beyond(u, 1, 0, mode)]
    return [x for row in rows for x in (beyond(row, -1, 1, mode), row, beyond(row, 1, 1, mode))]


def loop(step):
    return lambda u: lax.fori_loop(0, STEPS, lambda _, v: step(v), u)


# ---- programs, as written and by hand


def periodic(u):
    return u + 0.2 * (at(u, 1, 0) + at(u, -1, 0) + at(u, 1, 1) + at(u, -1, 1) - 4 * u)


def wrap_padded(u):
    p = jnp.pad(u, 1, mode="wrap")
    return u + 0.2 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)


def heat(u):
    return u.at[1:-1, 1:-1].add(0.2 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]))


def heat_by_hand(u):
    return jnp.where(inner(u), periodic(u), u)


def heat_concatenated(u):
    ghost = jnp.zeros((1, u.shape[1]))
    p = jnp.concatenate([ghost, u, ghost])
    return u + 0.25 * (p[2:] + p[:-2] - 2 * u)


def heat_concatenated_by_hand(u):
    return u + 0.25 * (beyond(u, 1, 0, "zero") + beyond(u, -1, 0, "zero") - 2 * u)


def heat_3d(u):
    c = u[1:-1, 1:-1, 1:-1]
    near = u[2:, 1:-1, 1:-1] + u[:-2, 1:-1, 1:-1] + u[1:-1, 2:, 1:-1] + u[1:-1, :-2, 1:-1] + u[1:-1, 1:-1, 2:]
    return u.at[1:-1, 1:-1, 1:-1].add(0.1 * (near + u[1:-1, 1:-1, :-2] - 6 * c))


def heat_3d_by_hand(u):
    near = sum(at(u, by, dim) for dim in range(3) for by in (1, -1))
    return jnp.where(inner(u), u + 0.1 * (near - 6 * u), u)


def edge_padded(u):
    p = jnp.pad(u, 1, mode="edge")
    return u + 0.2 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)


def edge_padded_by_hand(u):
    near = beyond(u, 1, 0) + beyond(u, -1, 0) + beyond(u, 1, 1) + beyond(u, -1, 1)
    return u + 0.2 * (near - 4 * u)


def walled(u):
    p = jnp.pad(u, 1)
    p = p.at[0].set(-p[1]).at[-1].set(-p[-2])
    p = p.at[:, 0].set(p[:, 1]).at[:, -1].set(p[:, -2])
    return u + 0.2 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)


def walled_by_hand(u):
    def mirrored(by):  # minus the last row outside
        return 2 * beyond(u, by, 0, "zero") - beyond(u, by, 0)

    return u + 0.2 * (mirrored(1) + mirrored(-1) + beyond(u, 1, 1) + beyond(u, -1, 1) - 4 * u)


def life(g):
    p, (rows, columns) = jnp.pad(g, 1), g.shape
    n = sum(p[i : i + rows, j : j + columns] for i in range(3) for j in range(3)) - g
    return jnp.where((n == 3) | ((g == 1) & (n == 2)), 1.0, 0.0)


def life_by_hand(g):
    n = sum(around(g, "zero")) - g
    return jnp.where((n == 3) | ((g == 1) & (n == 2)), 1.0, 0.0)


def upwind_by_hand(u):
    return jnp.where(place(u, 0) > 0, u - 0.5 * (u - at(u, -1, 0)), u)


def boundaries_by_hand(u):
    found = 0.5 * (u + at(u, -1, 0))
    return jnp.where(place(u, 0) == 0, 1.0, jnp.where(place(u, 0) == u.shape[0] - 1, 0.0, found))


def gradient_by_hand(u):
    def along(d):
        ends = jnp.where(place(u, d) == 0, at(u, 1, d) - u, u - at(u, -1, d))
        return jnp.where(inner(u, 1, [d]), 0.5 * (at(u, 1, d) - at(u, -1, d)), ends)

    return jnp.stack([along(0), along(1)])


def median(u):
    p, (rows, columns) = jnp.pad(u, 1, mode="reflect"), u.shape
    return jnp.median(jnp.stack([p[i : i + rows, j : j + columns] for i in range(3) for j in range(3)]), 0)


def moving_average(u):
    return jax.vmap(lambda c: jnp.convolve(c, jnp.ones(5) / 5, mode="same"), in_axes=1, out_axes=1)(u[:, :4])


def moving_average_by_hand(u):
    u = u[:, :4]
    near = [
        jnp.where((place(u, 0) + by >= 0) & (place(u, 0) + by < u.shape[0]), at(u, by, 0), 0) for by in range(-2, 3)
    ]
    return sum(near) / 5


def halved(u):
    return 0.5 * u[::2] + 0.25 * (jnp.roll(u, 1, 0)[::2] + jnp.roll(u, -1, 0)[::2])


def halved_by_hand(u):
    return (0.5 * u + 0.25 * (at(u, -1, 0) + at(u, 1, 0))).reshape(-1, 2, u.shape[1])[:, 0]


def staggered(u):
    v = u.at[:-1].add(0.1 * (u[1:] - u[:-1]))
    return v.at[1:].add(-0.1 * (v[1:] - v[:-1]))


def staggered_by_hand(u):
    v = jnp.where(place(u, 0) < u.shape[0] - 1, u + 0.1 * (at(u, 1, 0) - u), u)
    return jnp.where(place(u, 0) > 0, v - 0.1 * (v - at(v, -1, 0)), v)


def wave(y):
    before, u = y
    next_ = 2 * u[1:-1, 1:-1] - before[1:-1, 1:-1]
    next_ += 0.2 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1])
    return jnp.stack([u, jnp.pad(next_, 1)])


def wave_by_hand(y):
    before, u = y
    return jnp.stack([u, jnp.where(inner(u), u + periodic(u) - before, 0)])


def fourth_order(u):
    return u.at[2:-2].add((-u[4:] + 16 * u[3:-1] - 30 * u[2:-2] + 16 * u[1:-3] - u[:-4]) / 120)


def fourth_order_by_hand(u):
    far, near = at(u, 2, 0) + at(u, -2, 0), at(u, 1, 0) + at(u, -1, 0)
    return jnp.where(inner(u, 2, [0]), u + (16 * near - far - 30 * u) / 120, u)


def box(u):
    p = jnp.pad(u, ((8, 8), (0, 0)))
    return sum(p[i : i + u.shape[0]] for i in range(17)) / 17


def box_by_hand(u):
    def near(by):
        return jnp.where((place(u, 0) + by >= 0) & (place(u, 0) + by < u.shape[0]), at(u, by, 0), 0)

    return sum(near(by) for by in range(-8, 9)) / 17


def variation(u):
    return jnp.sqrt(jnp.diff(u, axis=0) ** 2 + 1e-3).sum() + jnp.sqrt(jnp.diff(u, axis=1) ** 2 + 1e-3).sum()


def variation_gradient_by_hand(u):
    def along(d):
        step = at(u, 1, d) - u
        flow = jnp.where(place(u, d) < u.shape[d] - 1, step / jnp.sqrt(step**2 + 1e-3), 0)
        return at(flow, -1, d) - flow

    return along(0) + along(1)


def sobel(x):
    p = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    n, k = x.shape[1:3]
    y = sum(w * (p[:, 2:, j : j + k] - p[:, :-2, j : j + k]) for j, w in enumerate((1, 2, 1)))
    z = sum(w * (p[:, i : i + n, 2:] - p[:, i : i + n, :-2]) for i, w in enumerate((1, 2, 1)))
    return jnp.hypot(y, z)


def sobel_by_hand(x):
    def smooth(v, d):
        return beyond(v, -1, d) + 2 * v + beyond(v, 1, d)

    y, z = (smooth(beyond(x, 1, d) - beyond(x, -1, d), 3 - d) for d in (1, 2))
    return jnp.hypot(y, z)


def convolved(u):
    """Diffusion by a kernel on an image with ghost cells."""
    kernel, p = jnp.array([[0.0, 0.2, 0], [0.2, 0.2, 0.2], [0, 0.2, 0]]), jnp.pad(u, 1, mode="edge")
    return lax.conv(p[None, None], kernel[None, None], (1, 1), "VALID")[0, 0]


def convolved_by_hand(u):
    return 0.2 * (u + sum(beyond(u, by, dim) for by in (-1, 1) for dim in (0, 1)))


def red_black(u):
    for first in (1, 2):
        mean = 0.5 * (u[first - 1 : -2 : 2] + u[first + 1 :: 2])
        u = u.at[first:-1:2].set(mean)
    return u


def red_black_by_hand(u):
    for first in (1, 2):
        mine = (place(u, 0) % 2 == first % 2) & inner(u, 1, [0])
        u = jnp.where(mine, 0.5 * (at(u, -1, 0) + at(u, 1, 0)), u)
    return u


IN_LOOP = {
    "periodic, by roll": (periodic, periodic, (2, 2)),
    "periodic, wrap padded": (wrap_padded, periodic, (2, 2)),
    "inner points updated": (heat, heat_by_hand, (2, 2)),
    "edges padded": (edge_padded, edge_padded_by_hand, (2, 2)),
    "ghost cells": (walled, walled_by_hand, (2, 2)),
    "zero rows concatenated": (heat_concatenated, heat_concatenated_by_hand, (2, 0)),
    "upwind": (lambda u: u.at[1:].add(-0.5 * (u[1:] - u[:-1])), upwind_by_hand, (1, 0)),
    "boundaries set": (
        lambda u: (0.5 * (u + jnp.roll(u, 1, 0))).at[0].set(1.0).at[-1].set(0.0),
        boundaries_by_hand,
        (1, 0),
    ),
    "staggered": (staggered, staggered_by_hand, (2, 0)),
    "fourth order": (fourth_order, fourth_order_by_hand, (4, 0)),
    "red and black rows": (red_black, red_black_by_hand, (4, 0)),
}
"""Name: one step as written, the same by hand, reach. Rows are sharded."""

STENCILS: dict[str, Stencil] = {
    **{name: Stencil(loop(step), loop(hand), reach, steps=STEPS) for name, (step, hand, reach) in IN_LOOP.items()},
    "inner points, columns": Stencil(loop(heat), loop(heat_by_hand), (2, 2), strategy=(1, 8), steps=STEPS),
    "inner points, 2 x 4": Stencil(loop(heat), loop(heat_by_hand), (2, 2), strategy=(2, 4), steps=STEPS),
    "edges padded, 2 x 4": Stencil(loop(edge_padded), loop(edge_padded_by_hand), (2, 2), strategy=(2, 4), steps=STEPS),
    "life": Stencil(loop(life), loop(life_by_hand), (2, 2), steps=STEPS, corners=True),
    "life, 2 x 4": Stencil(loop(life), loop(life_by_hand), (2, 2), strategy=(2, 4), steps=STEPS, corners=True),
    "wave": Stencil(loop(wave), loop(wave_by_hand), (0, 1, 1), (2, N, N), (1, 8, 1), STEPS),  # of one field in two
    "3D, slabs": Stencil(loop(heat_3d), loop(heat_3d_by_hand), (2, 2, 2), (64, 64, 64), (8, 1, 1), STEPS),
    "3D, 2 x 2 x 2": Stencil(loop(heat_3d), loop(heat_3d_by_hand), (2, 2, 2), (64, 64, 64), (2, 2, 2), STEPS),
    "jnp.gradient": Stencil(lambda u: jnp.stack(jnp.gradient(u)), gradient_by_hand, (2, 2)),
    "jnp.diff": Stencil(lambda u: jnp.diff(u, axis=0, append=0.0), lambda u: beyond(u, 1, 0, "zero") - u, (1, 0)),
    "median, reflected": Stencil(
        median, lambda u: jnp.median(jnp.stack(around(u, "reflect")), 0), (2, 2), corners=True
    ),
    "median, 2 x 4": Stencil(
        median, lambda u: jnp.median(jnp.stack(around(u, "reflect")), 0), (2, 2), strategy=(2, 4), corners=True
    ),
    "sobel of a batch": Stencil(sobel, sobel_by_hand, (0, 2, 2, 0), (4, 256, 256, 4), (2, 4, 1, 1), corners=True),
    "moving average": Stencil(moving_average, moving_average_by_hand, (4, 0), (N * N // 4, 4)),
    "a kernel, 2 x 4": Stencil(
        loop(convolved), loop(convolved_by_hand), (2, 2), strategy=(2, 4), steps=STEPS, corners=True
    ),
    **{
        f"a gas{name}": Stencil(
            gas.written, lambda u: gas.by_hand(u, beyond), (0, 2, 2), (4, N // 2, N // 2), cut, gas.STEPS
        )
        for name, cut in (("", (1, 8, 1)), (", 2 x 4", (1, 2, 4)))
    },
    "17 rows, wide halo": Stencil(box, box_by_hand, (16, 0)),
    "every second row": Stencil(halved, halved_by_hand, (1, 0)),
    "gradient of a variation": Stencil(jax.grad(variation), variation_gradient_by_hand, (2, 2)),
}


def slope(function):
    """The gradient of a sum of sines of a function, which reads what the function made."""
    return jax.grad(lambda u: jnp.sin(function(u)).sum())


GRADIENTS: dict[str, Stencil] = {
    name: dataclasses.replace(one, written=slope(one.written), by_hand=slope(one.by_hand), steps=2 * one.steps)
    for name, one in STENCILS.items()
    if not name.startswith(("life", "median", "gradient of"))
}
"""Gradients of the programs that have one everywhere. Their halo is that of both ways."""


# ---- measuring


def ms_of(functions: Sequence[Function], u: Any, rounds: int) -> list[tuple[float, ...]]:
    """Milliseconds of a call of each, in turn, with the order reversed every other round; rounds end after `MOST_S`."""

    def once(function: Function) -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(u))
        return 1e3 * (time.perf_counter() - start)

    for function in functions:
        once(function)
    found, start = [], time.perf_counter()
    while len(found) < rounds and (len(found) < 8 or time.perf_counter() - start < MOST_S):
        turn = slice(None, None, -1 if len(found) % 2 else 1)
        times = [once(function) for function in functions[turn]]
        found.append(tuple(times[turn]))
    return found


def measure(name: str, stencil: Stencil, rounds: int, is_gradient: bool = False) -> harness.Row:
    """The row of a program. Of a gradient the array has no two values alike."""
    drawn = np.random.default_rng(0).random(stencil.shape)
    u = jnp.asarray(drawn if is_gradient else drawn > 0.5, jnp.float32)
    written, by_hand = (shardfn.shard(f, (stencil.strategy,)) for f in (stencil.written, stencil.by_hand))
    expected = jax.jit(stencil.written)(u)
    plan, hand = written.plan(u), by_hand.plan(u)
    sent, hand_sent = (sum(c.total_bytes for c in compile_plan(p).collectives) for p in (plan, hand))
    np.testing.assert_allclose(jax.jit(stencil.by_hand)(u), expected, atol=1e-4, err_msg=f"{name}, by hand")
    is_right = np.allclose(written(u), expected, atol=1e-4)
    u = jax.device_put(u, jax.sharding.NamedSharding(plan.mesh, plan.inputs[0].partition_spec))
    pairs = ms_of((written, by_hand), u, rounds)
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "program": name,
        "strategy": " x ".join(map(str, stencil.strategy)),
        "predicted": round(plan.cost.bytes_sent),
        "compiled": sent,
        "by hand": hand_sent,
        "halo": stencil.halo,
        "ratio": sent / stencil.halo,
        "values": "right" if is_right else "WRONG",
        "ms": ours,
        "ms by hand": theirs,
        "time ratio": statistics.median(a / b for a, b in pairs),
    }


def lines(*functions: Function) -> int:
    """Lines of code of functions, without their docstrings and empty lines.

    >>> lines(heat_by_hand)
    2
    """
    texts = ([line.strip() for line in inspect.getsource(f).splitlines()] for f in functions)
    return sum(bool(line) and not line.startswith(('"""', "#")) for text in texts for line in text)


def beside_shard_map(name: str, rounds: int) -> harness.Row:
    """The row of a program of the gallery."""
    step, shape, _, strategy, _ = gallery.PROGRAMS[name]
    x = gallery.start(name, tuple(min(n, N) for n in shape))
    run = gallery.repeated(step, STEPS)
    sharded = shardfn.shard(run, (strategy,))
    by_hand, sharding = stencils_by_hand.on_devices(name, STEPS, strategy)
    expected, x = jax.jit(run)(x), jax.device_put(x, sharding)
    for function in (sharded, by_hand):
        np.testing.assert_allclose(function(x), expected, atol=1e-4, err_msg=name)
    programs = compile_plan(sharded.plan(x)), read(by_hand.lower(x).compile())
    sent, hand_sent = (sum(c.total_bytes for c in made.collectives) for made in programs)
    pairs = ms_of((sharded, by_hand), x, rounds)
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    in_both = [gallery.collide] * (name == "flow")
    return {
        "program": name,
        "strategy": " x ".join(map(str, strategy)),
        "lines": lines(step, *in_both),
        "lines by hand": lines(stencils_by_hand.STEPS[name], *stencils_by_hand.HELPERS, *in_both),
        "bytes": sent,
        "bytes by hand": hand_sent,
        "ms": ours,
        "ms by hand": theirs,
        "time ratio": statistics.median(a / b for a, b in pairs),
    }


def main() -> None:
    """Print the tables, and what misses its aim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(STENCILS), choices=STENCILS, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=201)
    options = harness.parse(parser, devices=DEVICES)
    rows = [measure(name, STENCILS[name], options.rounds) for name in options.only]
    named = [name for name in options.only if name in GRADIENTS]
    slopes = [measure(name, GRADIENTS[name], options.rounds, is_gradient=True) for name in named]
    for table, title in ((rows, ""), (slopes, "gradients, beside the halo of both ways")):
        harness.show(table, title)
        for figure, aim in (("ratio", AIM_BYTES), ("time ratio", AIM_TIME)):
            beyond_aim = [row["program"] for row in table if row[figure] > aim]
            print(f"{figure} above {aim}: {', '.join(beyond_aim) or 'none'}")
    beside = [beside_shard_map(name, options.rounds) for name in gallery.SIZES]
    harness.show(beside, "beside jax.shard_map and ppermute")
    harness.save(options.json, {"programs": rows, "gradients": slopes, "shard_map": beside})


if __name__ == "__main__":
    main()

"""Array programs that were found wrong: by the fuzzer, in public reports, or in trials. Each row is tested as it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import shardfn
from tests.fuzz.packs import Pack
from tests.fuzz.programs import Input, Program, Step


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays, and strategies under which it was wrong or might be.

    Attributes:
      function: takes arrays, returns an array or a tree of arrays.
      shapes: those of the arguments.
      strategies: rows of one strategy for each argument. The first row is tested always, the others by `make slow`.
      dtypes: those of the arguments; all get the same.
      gradient: whether JAX has a gradient.
      devices: how many devices; a row of strategies is tested on each.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    strategies: tuple[tuple[tuple[int, ...], ...], ...]
    dtypes: tuple[str, ...] = ("float32", "int32")
    gradient: bool = True
    devices: tuple[int, ...] = (8, 4)


def case(function: Any, shape: tuple[int, ...], *strategies: tuple[int, ...], **more: Any) -> Case:
    """A case of one argument."""
    return Case(function, (shape,), tuple((s,) for s in strategies), **more)


def heat(u: jax.Array) -> jax.Array:
    def step(_: int, u: jax.Array) -> jax.Array:
        inner = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
        n = u.at[1:-1, 1:-1].add(0.2 * inner)
        return n.at[0].set(1.0).at[-1].set(0.0).at[:, 0].set(n[:, 1]).at[:, -1].set(n[:, -2])

    return lax.fori_loop(0, 10, step, u)


def beside_a_nested_function(x: jax.Array) -> jax.Array:
    filled = x.at[3:-2].set(jnp.ones_like(x)[1:60])  # JAX 0.12 reshards what is set where `x` comes with a mesh
    return shardfn.shard(lambda u: u.at[-1].add(-1.0), ((2,),))(filled)


def moved_element(x: jax.Array) -> jax.Array:
    p = jnp.pad(x, (3, 0)).at[:-3].set(jnp.pad(x, (3, 0))[3:])
    return p.at[21:22].set(p[5:6])


def sliding_buffer(x: jax.Array) -> Any:
    return lax.scan(
        lambda b, r: ((n := b.at[:-1].set(b[1:]).at[-1].set(r)), n.sum()), x, jnp.ones((5, x.shape[1]), x.dtype)
    )


FLOAT = ("float32",)

CASES = {
    "one row twice, against two others": case(
        lambda x: jnp.diff(jnp.concatenate([x[2:3] - x[:1]] * 2), axis=0, prepend=1.5) + x[:2],
        (16, 4),
        (2, 1),
        (2, 2),
        (1, 4),
    ),
    "a slice set, then the last row set": case(lambda x: x.at[2:5].set(7).at[-1].set(1), (8,), (4,), (8,), (2,)),
    "rows shifted up, then the last row set": case(
        lambda x: x.at[:-1].set(x[1:]).at[-1].set(1), (16, 16), (8, 1), (2, 4), (4, 2), (2, 1), (1, 4)
    ),
    "a slice scaled, then the first row set": case(
        lambda x: x.at[3:].multiply(2).at[0].set(2), (8,), (4,), (2,), (8,), gradient=False
    ),
    "rows shifted down by one, and by two, one behind the other": case(
        lambda x: jnp.concatenate([x.at[:-1].set(x[1:]), x.at[:-2].set(x[2:])]), (24,), (8,), (2,)
    ),
    "two slices, max then add": case(
        lambda x: x.at[9:18].max(1).at[23:24].add(1), (24,), (8,), (4,), (2,), gradient=False
    ),
    "a slice, then an element of it": case(lambda x: x[1:13].at[0].set(2), (32,), (8,), (2,), (4,)),
    "concatenated, then an element": case(
        lambda x: jnp.concatenate([x, 2 * x[17:23]]).at[15].set(2), (24,), (8,), (4,), (2,)
    ),
    "concatenated, then the last element": case(
        lambda x: jnp.concatenate([2 * x[5:14], x]).at[-1].set(2), (16,), (4,), (8,), (2,)
    ),
    "padded between elements, then the first": case(
        lambda x: lax.pad(x, jnp.ones((), x.dtype), [(3, 0, 1)]).at[0].set(2), (16,), (2,), (4,), (8,)
    ),
    "a constant row after rows without a derivative": case(
        lambda x: (jnp.concatenate([jnp.round(x[:5]), x.sum(keepdims=True)]), x.at[:-1].set(x[1:])), (16,), (8,), (4,)
    ),
    "padded, shifted, one element moved": case(moved_element, (24,), (8,), (4,), (2,)),
    "a short slice, then a strided one": case(lambda x: x[10:12][1::3], (24,), (2,), (4,), (8,)),
    "a slice of ones set, then an element inside a nested sharded function": case(
        beside_a_nested_function, (64,), (2,), (4,), (8,), dtypes=FLOAT
    ),
    "a sliding buffer in a scan": case(sliding_buffer, (16, 16), (8, 1), (2, 2), (1, 8)),
    "scatter-add of three rows over two shards": case(
        lambda x: jnp.zeros((16, 4), x.dtype).at[jnp.array([3, 1, 1])].add(x[:3]),
        (16, 4),
        (2, 1),
        (4, 1),
        (2, 2),
        (8, 1),
    ),
    "segment_sum of 513 rows": case(
        lambda x: jax.ops.segment_sum(x[:513], jnp.arange(513) * 7 % 63 + 1, num_segments=64),
        (1024, 4),
        (2, 4),
        (4, 2),
        (4, 1),
    ),
    "heat with fixed edges": case(heat, (64, 64), (8, 1), (2, 4), (4, 1), dtypes=FLOAT),
    "an element, then a slice": case(
        lambda x: x.at[0].set(2).at[12:14].set(2), (16, 8), (2, 2), (4, 1), (8, 1), (2, 1)
    ),
    "an element, then one fewer": case(
        lambda x: lax.pad(x.at[0].set(2), jnp.ones((), x.dtype), [(0, -1, 0)]), (32,), (2,), (4,), (8,)
    ),
    "every second element plus a slice": case(lambda x: x.at[1:-1:2].add(x[18:49]), (64,), (2,), (4,), (8,)),
    "an element, then max pooling": case(
        lambda x: lax.reduce_window(x.at[0].set(-1), -jnp.inf, lax.max, (3,), (2,), "VALID"),
        (8,),
        (2,),
        (4,),
        dtypes=FLOAT,
    ),
    "scatter-add of rows into one row": case(
        lambda x: jnp.zeros((1, 8), x.dtype).at[jnp.arange(3) * 0].add(x[:3]), (4, 8), (2, 1), (4, 1), (2, 2)
    ),
}


def lines(
    shape: tuple[int, ...],
    strategy: tuple[Any, ...],
    *texts: str,
    checks: tuple[str, ...] = ("values", "inside", "outside"),
    devices: int = 2,
    dtype: str = "float32",
    device: str = "",
) -> Pack:
    """Lines of a program of one input `x0`, whose values are v0, v1, …; as the fuzzer prints it."""
    steps = tuple(Step(f"v{i}", text, "elementwise") for i, text in enumerate(texts))
    return Pack((Program((Input("x0", shape, dtype, strategy),), steps, (steps[-1].name,)),), devices, checks, device)


PROGRAMS = {
    "an element of a dynamic slice at a constant place": lines(
        (12, 12), (3, 1), "x0.T", "lax.dynamic_slice(v0, [0, 0], [12, 4])", "v1.at[0, 0].set(0.0)", devices=3
    ),
    "an element of a Fourier transform": lines((4,), (2,), "jnp.fft.ifft(x0)", "v0.at[0].set(2.0)"),
    "rows shifted, then one of bools": lines(
        (4,), (2,), "x0.at[2:].set(x0[:-2])", "v0.at[1].set(v0[0])", dtype="bool", checks=("values",)
    ),
    "a reversed slice, the least of two": lines(
        (24,), (2,), "x0.at[5:-24:-1].min(x0[19:])", devices=4, checks=("values",)
    ),
    "a dynamic slice, then its first element": lines(
        (16,), (4,), "lax.dynamic_slice(x0, [6], [10])", "v0.at[0].add(0.0)", devices=4
    ),
    "a cumulative product, without its first row": lines(
        (64, 8), (2, 1), "lax.cumprod(jnp.cos(x0), 0)", "v0[-63:, ::-1]", devices=4
    ),
    "repeated rows, each third multiplied": lines(
        (32, 1), (2, 1), "jnp.repeat(x0, 2, axis=0)", "v0.at[:-1:3].multiply(v0[33:54])"
    ),
    "each third multiplied at clamped places": lines(
        (32, 1), (2, 1), "x0.at[3 * jnp.arange(5)].multiply(x0[7:12], mode='clip', unique_indices=True)"
    ),
    "the trapezoidal rule, beside a shift": lines(
        (12, 32), (1, 2), "jnp.trapezoid(jnp.expand_dims(x0, 0), axis=1)", "(v0, x0.at[:, 1:].add(x0[:, :-1]))"
    ),
    "a Fourier transform of shards of one element": lines(
        (1, 1, 2), (1, 1, 2), "jnp.fft.fft(x0, axis=0)", "jnp.concatenate([v0, x0[0:]], 0)", dtype="complex64"
    ),
    "a stencil, then a bound of every second row": lines(
        (8, 8), (1, 2), "x0.at[1:-1, 1:-1].add(0.2 * (x0[2:, 1:-1] + x0[1:-1, :-2]))", "v0.at[1:-1:2].min(2.0)"
    ),
    "a row outside": lines((24, 8), (8, 1), "jnp.sin(x0)", "v0[30] * x0[-40]", devices=8),
    "padding alone": lines((4,), (4,), "lax.pad(x0[:1], 0.0, [(2, -1, 0)])", devices=4),
    "one row by a stride": lines((48, 1), (3, 1), "lax.slice(x0, [47, 0], [48, 1], [3, 1])", devices=3),
    "the first row, where each shard has one": lines((8,), (8,), "jnp.concatenate([x0, x0[0:1]], 0)", devices=8),
    "a derivative of a minimum over windows, then a slice": lines(
        (4,),
        (4,),
        "lax.reduce_window(x0, jnp.inf, lax.min, (1,), (1,), [(0, 0)])",
        "v0[:2]",
        devices=8,
        checks=("second",),
    ),
    "a gradient that is resharded back over 2 x 3 devices": Pack(
        (
            Program(
                (Input("x0", (2, 6), "float32", (1, 6)),),
                (Step("v0", "x0.at[:, :-1].set(2.0)", "at_slice"),),
                ("v0",),
                results_as=(("v0", (2, 1)),),
            ),
        ),
        6,
        ("values", "inside", "outside"),
    ),
    "a gradient of one row that is sliced by a stride": lines((16, 24), (1, 4), "jnp.sin(x0[:, 0:1:2])", devices=4),
    "windows over all shards, of one result": lines(
        (3,), (3,), "lax.reduce_window(x0, -jnp.inf, lax.max, (4,), (1,), [(1, 0)])", devices=3
    ),
    "windows with strides whose results are on a few shards": lines(
        (8,), (8,), "lax.reduce_window(x0, 0.0, lax.add, (4,), (2,), [(1, 0)])", devices=8
    ),
    "a function inside, beside windows of its own": lines(
        (48, 8),
        (2, 1),
        "jnp.einsum('ij,ij->i', x0, x0 + 1)",
        "shard(lambda u: u.at[14:5:-1].add(-1.0), ((1, 1),))(v0.reshape((16, 3)))",
        "(jnp.tanh(jnp.convolve(v0, jnp.cos(jnp.arange(3.0)), 'same')), lax.cummax(v1, 0), lax.cummin(v1, 0))",
    ),
    "an image resized to its own size": lines((48, 12), (1, 1), "jax.image.resize(x0, (48, 12), 'cubic')"),
    "a cumulative sum of exponentials": lines((24,), (4,), "lax.cumlogsumexp(x0, 0)", devices=4),
    "a cumulative product of two rows a shard": lines((4,), (2,), "lax.cumprod(jnp.cos(x0), 0)"),
    "the greatest at places of a column": Pack(
        (
            Program(
                (Input("x0", (2, 12), "int32", (2, 2)),),
                (Step("v0", "x0[:, 0]", "element"), Step("v1", "v0.at[abs(v0) % 1].max(0)", "at_indices")),
                ("v1",),
            ),
            Program(
                (Input("x1", (12, 8), "float32", (1, 1)),), (Step("v2", "x1.at[::-1].set(1.5)", "at_slice"),), ("v2",)
            ),
        ),
        4,
        ("values",),
    ),
    "an associative scan of two rows a shard": lines((4,), (2,), "lax.associative_scan(jnp.maximum, x0, axis=0)"),
    "padded by means, then cropped by a pad": lines(
        (2, 2), (2, 1), "jnp.pad(x0.T, ((1, 0), (2, 0)), mode='mean')", "lax.pad(v0, 2.0, [(0, 0, 0), (0, -1, 0)])"
    ),
    "rows shifted, then a part added to in reverse": lines(
        (8,), (2,), "x0.at[:-1].set(x0[1:])", "v0.at[:3:-1].add(0.5)"
    ),
    "a grouped convolution with windows of one": lines(
        (32, 48),
        (2, 1),
        "lax.conv_general_dilated(x0[None], jnp.cos(jnp.arange(64.0)).reshape(8, 8, 1), (1,), 'VALID', feature_group_count=4)",
    ),
    "a function inside that takes a slice of all rows": lines(
        (12,), (1,), "x0[10:12]", "shard(lambda u: lax.dynamic_slice_in_dim(u, jnp.argmax(u[:1]), 2, 0), ((1,),))(v0)"
    ),
    "second derivative of a maximum over windows of one": lines(
        (8,), (2,), "lax.reduce_window(x0, -jnp.inf, lax.max, (1,), (1,), 'VALID')", checks=("values", "second")
    ),
    "image gradient of a convolution to fewer rows than shards": lines(
        (2, 4),
        (2, 1),
        "lax.conv_general_dilated(x0[None, None], jnp.cos(jnp.arange(12.0)).reshape(2, 1, 3, 2), (1, 1), [(0, 1), (2, 0)])",
    ),
    "a slice written at a place that is clamped": lines(
        (12,), (3,), "lax.dynamic_update_slice_in_dim(x0, x0[:9], jnp.argmax(x0[:1]) + 7, 0)", devices=3
    ),
    "a slice from a place that is clamped": lines(
        (12,), (3,), "jnp.sin(lax.dynamic_slice_in_dim(x0, jnp.argmax(x0[:1]) + 7, 9))", devices=3
    ),
    "padded at one edge, then by a ramp, beside a slice": lines(
        (8,),
        (8,),
        "x0.at[-2].set(2.0)",
        "jnp.pad(v0, ((3, 0),), mode='edge')",
        "(jnp.pad(v1, ((2, 2),), mode='linear_ramp'), x0[3:])",
        devices=8,
    ),
    "an appended slice, then the first element": lines(
        (2,), (2,), "jnp.concatenate([x0, x0[1:2]])", "v0.at[0].set(0.0)"
    ),
    "padded by a ramp, then an index array": lines(
        (2,), (2,), "jnp.pad(x0, ((0, 1),), mode='linear_ramp')", 'v0.at[jnp.array([0])].set(-1.0, mode="drop")'
    ),
    "five points, then the first column": lines(
        (4, 4),
        (1, 2),
        "x0.at[1:-1, 1:-1].set(0.2 * (x0[2:, 1:-1] + x0[:-2, 1:-1] + x0[1:-1, 2:] + x0[1:-1, :-2]))",
        "v0.at[:, 0].set(0.5)",
    ),
    "the first row, then a block": lines((4, 2), (2, 1), "x0.at[0].set(2.0)", "v0.at[0:-1, 1:].set(1.5)"),
    "an element, then without it, searched": lines((4,), ("AUTO",), "x0.at[0].set(2.0)", "v0[1:]"),
    "a slice at a computed place, then an element": lines(
        (4, 3), (1, 3), "lax.dynamic_slice_in_dim(x0, jnp.argmax(x0[0]), 2, 0)", "v0.at[0, 0].set(0.0)", devices=3
    ),
    "an element inside a nested sharded function": lines(
        (4, 1), (1, 1), "shard(lambda u: u.at[-1].set(7.0), ((2, 1),))(x0)"
    ),
    "a reversed block, the greatest of two": lines(
        (2, 32), (1, 2), "x0.at[:, :-30:-1].max(x0[:, 3:])", checks=("values",), devices=4
    ),
    "the second derivative of a window of one": lines(
        (8, 2), (1, 1), "lax.reduce_window(x0, -jnp.inf, lax.max, (1, 1), (1, 1), 'VALID')", checks=("second",)
    ),
    "the gradient of a padded sort": lines(
        (1, 4), (1, 4), "lax.pad(x0, -2.0, [(0, 2, 0), (1, 2, 0)])", "jnp.sort(v0, axis=0, descending=True)", devices=4
    ),
    "the gradient of windows, sorted": lines(
        (1, 4),
        (1, 4),
        "lax.reduce_window(x0, -jnp.inf, lax.max, (1, 1), (1, 1), [(0, 2), (1, 2)])",
        "jnp.sort(v0, axis=0)",
        devices=4,
    ),
    "all of an array, then its first element, in a program around": lines(
        (32,), ("AUTO",), "lax.dynamic_slice(x0, [0], [32]).at[0].set(0.5)", "(v0, x0.at[:-2].set(x0[2:]))"
    ),
    "the greatest of one element": lines((32,), (2,), "jnp.split(x0, [31], 0)[1]", "lax.top_k(v0, 1)[0]", devices=4),
    "all elements by size": lines((6,), (2,), "lax.top_k(x0[1:], 5)[0]", devices=2),
    "the gradient of a transposed slice, sorted": lines(
        (1, 8),
        (1, 8),
        "jax.vmap(lambda u: jnp.flip(u, 0), in_axes=1, out_axes=0)(x0)",
        "v0[:1]",
        "jnp.sort(v1, axis=1)",
        devices=8,
    ),
    "a slice put into its own array at a computed place": lines(
        (2, 16), (2, 1), "x0[-1]", "lax.dynamic_update_slice_in_dim(v0, v0[:4], jnp.argmax(v0[:4]), 0)"
    ),
    "the same of a cumulative sum, scaled": lines(
        (4, 16), (2, 1), "jnp.cumsum(x0, 1)", "lax.dynamic_update_slice(v0, 2 * v0[:, :4], (0, jnp.argmax(v0[0, :4])))"
    ),
    "all of an array, then reversed": lines(
        (12, 8),
        (2, 1),
        "x0.at[:].set(1.0)",
        "lax.dynamic_update_slice(v0, v0[1:], (1, 0))",
        "(jnp.flip(v1, 0), x0 + v1)",
    ),
    "the gradient of a strided convolution with padding in front": lines(
        (4,), (4,), "lax.conv_general_dilated(x0[None, None], jnp.ones((2, 1, 1)), (2,), [(1, 0)])", devices=4
    ),
    "the gradient of a matmul of roots of differences": lines(
        (8, 4), (2, 1), "jnp.sqrt(jnp.diff(jnp.cumsum(jnp.abs(x0) + 0.1, 0), axis=0))", "v0 @ v0.T"
    ),
    "the gradient of the greatest root in each row": lines(
        (6, 4), (3, 1), "jnp.sqrt(jnp.diff(jnp.cumsum(jnp.abs(x0) + 0.1, 0), axis=0))", "v0.max(1)", devices=3
    ),
    "the gradient of cumulative products of roots": lines(
        (8, 4), (4, 1), "jnp.sqrt(jnp.diff(jnp.cumsum(jnp.abs(x0) + 0.1, 0), axis=0))", "jnp.cumprod(v0, 1)", devices=4
    ),
    "the gradient of the least of windows and the greatest element": lines(
        (16,),
        (2,),
        "lax.reduce_window(x0, jnp.inf, lax.min, (2,), (1,), [(0, 0)])",
        "(v0, lax.top_k(x0, 1)[0])",
        checks=("outside",),
    ),
    "the gradient of a sort and one looked-up row": lines(
        (16, 3), (2, 1), "(jnp.sort(x0, 0), x0[jnp.argmax(x0[:, 0])[None]])", checks=("outside",)
    ),
    "the gradient of a sort and the greatest element": lines(
        (16, 1), (4, 1), "(jnp.sort(x0, 0), lax.top_k(x0[:, 0], 1)[0])", devices=4, checks=("outside",)
    ),
    **{
        name: lines(
            (8, 8),
            (2, 1),
            "jnp.sum(x0, axis=(0, 1), keepdims=True) * x0[4:5, 5:6]",
            f"jnp.pad({ordered}, ((0, 0), (1, 2)))",
            devices=8,
            checks=("outside",),
        )
        for name, ordered in {
            "the gradient of an element times a sum, sorted and padded": "jnp.sort(v0, axis=1, descending=True)",
            "the gradient of the greatest of an element times a sum": "lax.top_k(v0, 1)[0]",
        }.items()
    },
    "the gradient of a product along a square array": lines((8, 8), (1, 8), "jnp.prod(x0, axis=1)", devices=8),
    "the gradient of the greatest three, padded": lines(
        (8, 8), (2, 1), "jnp.pad(lax.top_k(x0 * jnp.sum(x0), 3)[0], ((0, 0), (1, 2)))", devices=8, checks=("outside",)
    ),
    "five points of one array beside differences of another": Pack(
        (
            Program(
                (Input("x0", (24, 32), "float32", (6, 1)),),
                (Step("v0", "x0[2:, 1:-1] + x0[:-2, 1:-1] + x0[1:-1, 2:] + x0[1:-1, :-2]", "elementwise"),),
                ("v0",),
            ),
            Program(
                (Input("x1", (24, 32), "float32", (3, 2)),),
                (Step("v1", "jnp.diff(x1, axis=0)", "elementwise"),),
                ("v1",),
            ),
        ),
        6,
        ("outside",),
    ),
    "the least of rows, left to the search, beside a product of repeated elements": Pack(
        (
            Program(
                (Input("x0", (3,), "float32", (1,)),),
                (Step("v0", "jnp.repeat(x0, 2, axis=0)", "repeat"), Step("v1", "jnp.vdot(v0, v0)", "vector_product")),
                ("v1",),
            ),
            Program(
                (Input("x1", (8, 8), "float32", None),),
                (Step("v2", "x1.at[:-3].min(x1[3:])", "at_shift"),),
                ("v2",),
            ),
        ),
        3,
        ("inside",),
    ),
    "an update by an earlier part of a row, mapped over one column": Pack(
        (
            Program(
                (Input("x0", (4, 1), "float32", (1, 1)),),
                (
                    Step("v0", "jnp.pad(x0, ((0, 0), (0, 1)), mode='minimum')", "pad_statistic"),
                    Step("v1", "v0[:0:-1, :-2:-1]", "slice"),
                    Step(
                        "v2",
                        "jax.vmap(lambda u: lax.dynamic_update_slice_in_dim(u, u[0:-1], jnp.argmax(jnp.ravel(u).real[:1]), 0),"
                        " in_axes=1, out_axes=1)(v1)",
                        "vmap",
                    ),
                ),
                ("v2",),
            ),
        ),
        2,
        ("values",),
    ),
    "the only element set, left to the search, beside a mirrored concatenation": Pack(
        (
            Program(
                (Input("x0", (2,), "float32", (2,)),),
                (Step("v0", "jnp.concatenate([x0, x0[:0:-1]], 0)", "concatenate"),),
                ("v0",),
            ),
            Program((Input("x1", (1,), "bool", None),), (Step("v1", "x1.at[0].set(True)", "at_element"),), ("v1",)),
        ),
        2,
        ("values",),
    ),
}
"""Programs that may end the process, which are judged in another one; and those that are easier to read as lines."""

COMPILED = {
    "the gradient of second differences of rows minus their mean": lines(
        (8, 16), (2, 1), "x0 - x0.mean(1, keepdims=True)", "jnp.diff(v0, axis=0, n=2)", devices=8, device="h100:8"
    ),
    "heat that spreads twice, minus the mean of rows": lines(
        (16, 32),
        (4, 1),
        "x0.at[1:-1].add(x0[2:] + x0[:-2] - 2 * x0[1:-1])",
        "v0.at[1:-1].add(v0[2:] + v0[:-2] - 2 * v0[1:-1])",
        "v1 - v1.mean(1, keepdims=True)",
        devices=8,
        device="h100:8",
    ),
    "the gradient of a softmax of shifted rows": lines(
        (24, 16),
        (2, 1),
        "x0 - 0.5 * jnp.roll(x0, 1, 0)",
        "v0.at[3:].set(v0[:-3])",
        "jax.nn.softmax(v1, -1)",
        "v2 / jnp.sqrt((v2 * v2).mean(-1, keepdims=True))",
        devices=8,
        device="h100:8",
        checks=("outside",),
    ),
    "the gradient of the least of windows of a column": lines(
        (16, 1),
        (2, 1),
        "lax.reduce_window(x0, jnp.inf, lax.min, (2, 1), (3, 1), 'SAME')",
        devices=8,
        device="h100:8",
        checks=("inside",),
    ),
}
"""Programs that a compiler for devices that are not here did not compile, or whose plans failed."""

"""MindSpore's operators as JAX functions of the same tensors.

A case names an operator as MindSpore spells it: a constructor (`ops.Softmax(-1)`), and a call (`op(p[0])`, `p` being
the tensors), or only a name such as `MatMul(transpose_a)`. `TABLE` has a row for each operator: its constructor, with
MindSpore's parameters and defaults, gives the JAX function and says how the dims of the tensors belong together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Letters = tuple[str, ...]
"""One string for each tensor, one letter for each dim.

Equal letters are one dim, which MindSpore wants cut alike. MindSpore leaves a capital letter whole: the operator works
along that dim. A dot stands alone: a dim that is stretched, or one that the operator drops.
"""


@dataclasses.dataclass(frozen=True)
class Op:
    """An operator built with its constructor's arguments. Every function here takes the arguments of its call."""

    run: Callable[..., Any]
    dims: Callable[..., Letters]
    ids: Mapping[int, Callable[..., int]] = dataclasses.field(default_factory=dict)
    """The integer tensors, by number, and what their values stay below."""
    positive: bool = False
    entries: Callable[..., tuple[Any, Any]] = lambda cuts, *args, **said: (cuts, None)
    """MindSpore's strategy → the cuts of the arguments and (where MindSpore means the result) of the results."""
    call: str = "op(*p)"
    """The call, where a case doesn't say it."""
    needs: tuple[str, ...] = ()
    """Attributes without which MindSpore refuses the operator."""


# ---------------------------------------------------------------- how dims belong together


def along(x: Any, *dims: int) -> str:
    """A letter for each dim of `x`, capital on the `dims` that the operator works along.

    >>> along(np.zeros((2, 3, 4)), -1)
    'abC'
    """
    whole = {d % x.ndim for d in dims}
    return "".join(c.upper() if i in whole else c for i, c in enumerate("abcdefgh"[: x.ndim]))


def broadcast(*xs: Any) -> Letters:
    """Letters by position from the right; a dim of size 1 that is stretched stands alone.

    >>> broadcast(np.zeros((2, 3)), np.zeros((3,))), broadcast(np.zeros((2, 1)), np.zeros((1, 3)))
    (('ba', 'a'), ('b.', '.a'))
    """
    full = jnp.broadcast_shapes(*(x.shape for x in xs))[::-1]
    return tuple("".join("." if n != full[i] else "abcdefgh"[i] for i, n in enumerate(x.shape[::-1]))[::-1] for x in xs)


def same(xs: Sequence[Any], *dims: int) -> Letters:
    """Tensors of one shape, dim by dim."""
    return tuple(along(x, *dims) for x in xs)


# ---------------------------------------------------------------- families of operators


def unary(fn: Callable[..., Any], **options: Any) -> Callable[..., Op]:
    return lambda **_: Op(fn, lambda x, *_: (along(x),), **options)


def binary(fn: Callable[..., Any], **options: Any) -> Callable[..., Op]:
    return lambda: Op(fn, broadcast, **options)


def softmax(fn: Callable[..., Any]) -> Callable[..., Op]:
    return lambda axis=-1: Op(lambda x: fn(x, axis=axis), lambda x: (along(x, axis),))


def reduce(fn: Callable[..., Any]) -> Callable[..., Op]:
    def make(keep_dims: bool = False) -> Op:
        # MindSpore's empty tuple means every dim
        return Op(
            lambda x, axis=(): fn(x, axis=None if axis == () else axis, keepdims=keep_dims),
            lambda x, axis=(): (along(x),),
        )

    return make


# ---------------------------------------------------------------- single operators


def matmul(transpose_a: bool = False, transpose_b: bool = False) -> Op:
    def run(a: Any, b: Any) -> Any:
        a = jnp.swapaxes(a, -1, -2) if transpose_a else a
        return a @ (jnp.swapaxes(b, -1, -2) if transpose_b else b)

    def dims(a: Any, b: Any) -> Letters:
        batch = broadcast(np.empty(a.shape[:-2]), np.empty(b.shape[:-2]))
        return batch[0] + ("km" if transpose_a else "mk"), batch[1] + ("nk" if transpose_b else "kn")

    return Op(run, dims)


def concat(axis: int = 0) -> Op:
    return Op(lambda xs: jnp.concatenate(xs, axis), lambda xs: same(xs, axis), call="op(p)")


def stack(axis: int = 0) -> Op:
    return Op(lambda xs: jnp.stack(xs, axis), same, call="op(p)")


def split(axis: int = 0, output_num: int = 1) -> Op:
    return Op(lambda x: tuple(jnp.split(x, output_num, axis)), lambda x: (along(x, axis),))


def conv2d(
    out_channel: int, kernel_size: Any, mode: int = 1, pad_mode: str = "valid", pad: Any = 0, stride: Any = 1,
    dilation: Any = 1, group: int = 1, data_format: str = "NCHW",
) -> Op:  # fmt: skip
    def run(x: Any, w: Any) -> Any:
        padding = pad_mode.upper() if pad_mode != "pad" else [pair(pad)] * 2
        return jax.lax.conv_general_dilated(
            x, w, pair(stride), padding, rhs_dilation=pair(dilation), feature_group_count=group,
            dimension_numbers=(data_format, "OIHW", data_format),
        )  # fmt: skip

    return Op(run, lambda x, w: ("nchw" if data_format == "NCHW" else "nhwc", "ocPQ"))


def pair(n: Any) -> tuple[int, int]:
    return tuple(n) if isinstance(n, tuple) else (n, n)


def max_pool(kernel_size: Any = 1, strides: Any = 1, pad_mode: str = "valid", data_format: str = "NCHW") -> Op:
    def run(x: Any) -> Any:
        window, step = (1, 1, *pair(kernel_size)), (1, 1, *pair(strides))
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, step, pad_mode.upper())

    return Op(run, lambda x: (along(x),))


def per_channel(fn: Callable[..., Any]) -> Callable[..., Op]:
    """`fn` of `x` and a vector along dim 1 of `x`."""

    def run(x: Any, w: Any) -> Any:
        return fn(x, w.reshape(-1, *(1,) * (x.ndim - 2)) if w.size > 1 else w)

    return lambda **_: Op(run, lambda x, w: (along(x), "b" if w.size > 1 else "."))


def layer_norm(begin_norm_axis: int = 1, begin_params_axis: int = 1, epsilon: float = 1e-7) -> Op:
    def normed(x: Any) -> tuple[int, ...]:
        return tuple(range(begin_norm_axis % x.ndim, x.ndim))

    def run(x: Any, gamma: Any, beta: Any) -> Any:
        mean, var = jnp.mean(x, normed(x), keepdims=True), jnp.var(x, normed(x), keepdims=True)
        return (x - mean) / jnp.sqrt(var + epsilon) * gamma + beta, mean, var

    def dims(x: Any, gamma: Any, beta: Any) -> Letters:
        letters = along(x, *normed(x))
        params = letters[begin_params_axis % x.ndim :]
        return letters, params, params

    return Op(run, dims)


def rms_norm(epsilon: float = 1e-6) -> Op:
    def run(x: Any, gamma: Any) -> Any:
        scale = jax.lax.rsqrt(jnp.mean(x * x, tuple(range(x.ndim - gamma.ndim, x.ndim)), keepdims=True) + epsilon)
        return x * scale * gamma, scale

    return Op(run, broadcast)


def l2_normalize(axis: Any = 0, epsilon: float = 1e-4) -> Op:
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)

    def run(x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axes, keepdims=True), epsilon))

    return Op(run, lambda x: (along(x, *axes),))


def arg_max_with_value(axis: int = 0, keep_dims: bool = False) -> Op:
    # MindSpore lets the axis be cut (and warns that the result may be another)
    return Op(
        lambda x: (jnp.argmax(x, axis, keepdims=keep_dims), jnp.max(x, axis, keepdims=keep_dims)),
        lambda x: (along(x),),
    )


def top_k(sorted: bool = True) -> Op:
    return Op(lambda x, k: tuple(jax.lax.top_k(x, k)), lambda x, k: (along(x, -1),))


def cumsum(exclusive: bool = False, reverse: bool = False) -> Op:
    def run(x: Any, axis: int) -> Any:
        total = jax.lax.cumsum(x, axis % x.ndim, reverse)
        return total - x if exclusive else total

    return Op(run, lambda x, axis: (along(x, axis),))


def gather(batch_dims: int = 0) -> Op:
    def run(table: Any, ids: Any, axis: int = 0) -> Any:
        take = lambda t, i: jnp.take(t, i, axis % table.ndim - batch_dims)  # noqa: E731
        for _ in range(batch_dims):
            take = jax.vmap(take)
        return take(table, ids)

    def dims(table: Any, ids: Any, axis: int = 0) -> Letters:
        letters = along(table, axis)
        return letters, letters[:batch_dims] + "uvwxyz"[: ids.ndim - batch_dims]

    return Op(run, dims, {1: lambda table, ids, axis=0: table.shape[axis]})


def embedding_lookup() -> Op:
    return Op(
        lambda table, ids, offset=0: jnp.take(table, ids - offset, 0),
        lambda table, ids, offset=0: (along(table, 0), "uvwxyz"[: ids.ndim]),
        {1: lambda table, ids, offset=0: table.shape[0]},
        needs=("primitive_target",),
    )


def gather_d() -> Op:
    return Op(
        lambda x, dim, index: jnp.take_along_axis(x, index, dim),
        lambda x, dim, index: same((x, index), dim),
        {1: lambda x, dim, index: x.shape[dim]},
    )


def coordinates(index: Any) -> tuple[Any, ...]:
    return tuple(jnp.moveaxis(index, -1, 0))


def gather_nd() -> Op:
    # of x, MindSpore leaves every dim whole; of the index, the last
    return Op(
        lambda x, index: x[coordinates(index)],
        lambda x, index: (along(x, *range(x.ndim)), "uvwxyz"[: index.ndim - 1] + "I"),
        {1: lambda x, index: min(x.shape[: index.shape[-1]])},
    )


def scatter_update(use_locking: bool = True) -> Op:
    def dims(ref: Any, index: Any, updates: Any) -> Letters:
        at = "UVWXYZ"[: index.ndim]
        return along(ref, 0), at, at + along(ref)[1:]

    return Op(lambda ref, index, updates: ref.at[index].set(updates), dims, {1: lambda ref, *_: ref.shape[0]})


def tensor_scatter_update() -> Op:
    def dims(x: Any, index: Any, updates: Any) -> Letters:
        depth, at = index.shape[-1], "UVWXYZ"[: index.ndim - 1]
        return along(x, *range(depth)), at + "I", at + along(x)[depth:]

    return Op(
        lambda x, index, updates: x.at[coordinates(index)].set(updates),
        dims,
        {1: lambda x, index, updates: min(x.shape[: index.shape[-1]])},
    )


def unsorted_segment_sum() -> Op:
    def run(x: Any, ids: Any, num_segments: int) -> Any:
        rows = x.reshape(ids.size, *x.shape[ids.ndim :])
        return jax.ops.segment_sum(rows, ids.reshape(-1), num_segments)

    return Op(run, lambda x, ids, _: (along(x), along(x)[: ids.ndim]), {1: lambda x, ids, n: n})


def one_hot(axis: int = -1) -> Op:
    def run(ids: Any, depth: int, on: Any, off: Any) -> Any:
        return jnp.where(jax.nn.one_hot(ids, depth, axis=axis, dtype=bool), on, off)

    def entries(cuts: Any, ids: Any, *_: Any) -> tuple[Any, Any]:
        # MindSpore writes the cuts of the result as the entry of the ids
        result, *others = cuts
        if len(result) != ids.ndim + 1:
            return cuts, None
        at = axis % (ids.ndim + 1)
        return ((*result[:at], *result[at + 1 :]), *others), (result,)

    return Op(
        run, lambda ids, *_: (along(ids), "", ""), {0: lambda ids, depth, *_: depth}, entries=entries,
        call="op(p[0], 16, Tensor(1.0, ms.float32), Tensor(0.0, ms.float32))",
    )  # fmt: skip


def cross_entropy() -> Op:
    def run(logits: Any, labels: Any) -> Any:
        log = jax.nn.log_softmax(logits)
        return -jnp.sum(labels * log, -1), jnp.exp(log) - labels

    return Op(run, lambda x, y: same((x, y), -1))


def dropout(keep_prob: float = 0.5, Seed0: int = 0, Seed1: int = 0) -> Op:
    def run(x: Any) -> Any:
        mask = jax.random.bernoulli(jax.random.key(Seed0), keep_prob, x.shape)
        return jnp.where(mask, x / keep_prob, 0), mask

    return Op(run, lambda x: (along(x),))


def select() -> Op:
    return Op(jnp.where, lambda c, x, y: same((c, x, y)))


def transpose() -> Op:
    return Op(lambda x, perm: jnp.transpose(x, perm), lambda x, _: (along(x),))


def squeeze(axis: Any = ()) -> Op:
    return Op(lambda x: jnp.squeeze(x, None if axis == () else axis), lambda x: (along(x),))


def broadcast_to(shape: tuple[int, ...]) -> Op:
    return Op(lambda x: jnp.broadcast_to(x, shape), lambda x: broadcast(x, np.empty(shape))[:1])


def tile() -> Op:
    def repeats(x: Any, multiples: tuple[int, ...]) -> tuple[int, ...]:
        return (1,) * (x.ndim - len(multiples)) + tuple(multiples)

    def entries(cuts: Any, x: Any, multiples: tuple[int, ...]) -> tuple[Any, Any]:
        # where a dim is repeated, MindSpore cuts the repeats: a cut of the result, and none of the argument
        result, times = cuts[0], repeats(x, multiples)
        if len(cuts) != 1 or len(result) != x.ndim or len(times) != x.ndim or set(times) == {1}:
            return cuts, None
        return (tuple(1 if m > 1 else c for c, m in zip(result, times, strict=True)),), (tuple(result),)

    return Op(jnp.tile, lambda x, m: (along(x),), entries=entries)


def strided_slice(begin_mask: int = 0, end_mask: int = 0, **masks: int) -> Op:
    def run(x: Any, begin: Any, end: Any, strides: Any) -> Any:
        return x[tuple(slice(*bounds) for bounds in zip(begin, end, strides, strict=True))]

    def dims(x: Any, begin: Any, end: Any, strides: Any) -> Letters:
        bounds = zip(x.shape, begin, end, strides, strict=False)
        return (along(x, *(d for d, (n, b, e, s) in enumerate(bounds) if (b, e, s) != (0, n, 1))),)

    return Op(run, dims)


def slice_() -> Op:
    def dims(x: Any, begin: Any, size: Any) -> Letters:
        return (along(x, *(d for d, (n, b, s) in enumerate(zip(x.shape, begin, size, strict=True)) if s != n)),)

    return Op(lambda x, begin, size: jax.lax.slice(x, begin, [b + s for b, s in zip(begin, size, strict=True)]), dims)


TABLE: dict[str, Callable[..., Op]] = {
    # one tensor, element by element
    **{name: unary(getattr(jnp, name.lower()), positive=True) for name in ("Sqrt", "Log")},
    **{name: unary(getattr(jnp, name.lower())) for name in ("Abs", "Cos", "Exp", "Sin", "Square", "Tanh")},
    "ReLU": unary(jax.nn.relu), "Sigmoid": unary(jax.nn.sigmoid), "GeLU": unary(jax.nn.gelu),
    "Neg": unary(jnp.negative), "Cast": unary(lambda x, dtype: x.astype(dtype)), "Dropout": dropout,
    # several tensors, broadcast
    "Add": binary(jnp.add), "Sub": binary(jnp.subtract), "Mul": binary(jnp.multiply), "RealDiv": binary(jnp.divide),
    "Div": binary(jnp.divide), "Maximum": binary(jnp.maximum), "Minimum": binary(jnp.minimum),
    "Pow": binary(jnp.power, positive=True), "Equal": binary(jnp.equal), "NotEqual": binary(jnp.not_equal),
    "Greater": binary(jnp.greater), "Less": binary(jnp.less), "GreaterEqual": binary(jnp.greater_equal),
    "LessEqual": binary(jnp.less_equal),
    "AddN": lambda: Op(sum, same, call="op(p)"), "Select": select,
    "BiasAdd": per_channel(jnp.add), "PReLU": per_channel(lambda x, w: jnp.where(x > 0, x, w * x)),
    # products
    "MatMul": matmul, "BatchMatMul": matmul, "Conv2D": conv2d,
    # along a dim
    "Softmax": softmax(jax.nn.softmax), "LogSoftmax": softmax(jax.nn.log_softmax), "L2Normalize": l2_normalize,
    "LayerNorm": layer_norm, "RmsNorm": rms_norm, "SoftmaxCrossEntropyWithLogits": cross_entropy,
    "ReduceSum": reduce(jnp.sum), "ReduceMean": reduce(jnp.mean), "ReduceMax": reduce(jnp.max),
    "ReduceMin": reduce(jnp.min), "ReduceProd": reduce(jnp.prod), "ArgMaxWithValue": arg_max_with_value,
    "CumSum": cumsum, "TopK": top_k, "MaxPool": max_pool, "UnsortedSegmentSum": unsorted_segment_sum,
    # by index
    "Gather": gather, "SparseGatherV2": gather, "EmbeddingLookup": embedding_lookup, "GatherD": gather_d,
    "GatherNd": gather_nd, "ScatterUpdate": scatter_update, "TensorScatterUpdate": tensor_scatter_update,
    "OneHot": one_hot,
    # shape
    "Concat": concat, "Stack": stack, "Split": split, "Reshape": unary(jnp.reshape), "Transpose": transpose,
    "ExpandDims": unary(jnp.expand_dims), "Squeeze": squeeze, "BroadcastTo": broadcast_to, "Tile": tile,
    "StridedSlice": strided_slice, "Slice": slice_, "Tril": lambda diagonal=0: Op(
        lambda x: jnp.tril(x, diagonal), lambda x: (along(x),)
    ),
}  # fmt: skip

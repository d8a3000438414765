"""The numerical vocabulary of `jax.numpy` and `jax.lax`, as rows of the table of ops."""

from __future__ import annotations

import math

from tests.fuzz.drawing import Draw, NoFit, Value, op
from tests.fuzz.static_ops import EVERY, at

# ---- indices


@op(2, EVERY)
def dynamic_slice(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    start = f"jnp.argmax(jnp.ravel({x}).real[:5])" if x.dtype != "bool" else f"jnp.sum({x})"
    if d.coin():
        return f"lax.dynamic_slice_in_dim({x}, {start}, {d.int(1, x.shape[axis])}, {axis})"
    part = f"{x}[{at(x, axis, d.cut(x.shape[axis], plain=True)[0])}]"
    return f"lax.dynamic_update_slice_in_dim({x}, {part}, {start}, {axis})"


@op(2, EVERY, gradient=None)
def take(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    size = x.shape[axis]
    length = d.one(1, 2, 3, 5, 8, size)
    if d.coin(0.3):
        mode = d.one('mode="clip"', 'mode="fill", fill_value=0', 'mode="wrap"')
        return f"jnp.take({x}, {d.indices(size, length, outside=True)}, axis={axis}, {mode})"
    if d.coin(0.3):
        return f"{x}[{at(x, axis, d.indices(size, length))}]"
    return f"jnp.take({x}, {d.indices(size, length)}, axis={axis})"


@op(1, EVERY, ranks=(2,))
def gather_points(d: Draw, x: Value) -> str:
    length = d.one(2, 3, 4, 8)
    first, second = (f"jnp.arange({length}) * {d.one(1, 3, 5)} % {n}" for n in x.shape)
    if d.coin():
        return f"{x}[{first}, {second}]"
    return f"{x}.at[{first}, {second}].{'set(True)' if x.dtype == 'bool' else f'add({d.number(x)})'}"


@op(1.5, EVERY)
def take_along_axis(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    n = x.shape[axis]
    order = d.one(f"jnp.argsort({x}.real, axis={axis})" if x.dtype != "bool" else f"{x}.astype(int)",
                  f"(lax.broadcasted_iota(int, {x.shape}, {axis}) * 7 + 3) % {n}")  # fmt: skip
    return f"jnp.take_along_axis({x}, {order}, axis={axis})"


@op(1, "f", ranks=(2,))
def put_along_axis(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    return f"jnp.put_along_axis({x}, jnp.argmax({x}, {axis}, keepdims=True), {d.number(x)}, {axis}, inplace=False)"


@op(1, "i", ranks=(1, 2))
def one_hot(d: Draw, x: Value) -> str:
    return f"jax.nn.one_hot({x}, {d.one(8, 16, 21)})"


@op(2, "fi", gradient=None)
def segment(d: Draw, x: Value) -> str:
    n, k = x.shape[0], d.one(4, 8, 12, 16)
    ids = [v for v in d.values if v.dtype == "int32" and v.shape == (n,)]
    index = (
        f"abs({d.one(*ids)}) % {k}"
        if ids and d.coin(0.7)
        else f"jnp.arange({n}) * {d.one(1, 3, 5, 7)} % {k + d.one(0, 0, 2)}"
    )
    how = d.one("sum", "sum", "sum", "max", "min", "prod" if n <= 16 else "sum")
    return f"jnp.nan_to_num(jax.ops.segment_{how}({x}, {index}, num_segments={k}), posinf=0, neginf=0)"


@op(1, "fi")
def scatter_to_zeros(d: Draw, x: Value) -> str:
    k = d.one(8, 16, 24)
    shape = (k, *x.shape[1:])
    n = d.int(1, x.shape[0])
    index = d.one(f"jnp.arange({n}) * {d.one(1, 3, 5, 7)} % {k}", f"jnp.array({[d.int(0, k - 1) for _ in range(n)]})")
    return f"jnp.zeros({shape}, {x}.dtype).at[{index}].add({x}[:{n}])"


@op(1, "i", ranks=(1,))
def bincount(d: Draw, x: Value) -> str:
    return f"jnp.bincount(abs({x}) % 16, length=16)"


@op(1, EVERY, ranks=(1, 2))
def nonzero(d: Draw, x: Value) -> str:
    mask = x.name if x.dtype == "bool" else f"{x}.real > 0"
    return f"jnp.nonzero({mask}, size=8, fill_value=0)[0]"


# ---- order


@op(1.5, "fi")
def sort(d: Draw, x: Value) -> str:
    return f"jnp.sort({x}, axis={d.axis(x)}{d.one('', ', descending=True')})"


@op(1, "fi")
def argsort(d: Draw, x: Value) -> str:
    return f"jnp.argsort({x}, axis={d.axis(x)})"


@op(1, "f", ranks=(1, 2))
def sort_pairs(d: Draw, x: Value) -> str:
    return f"lax.sort(({x}, {d.other(x)}), dimension={d.axis(x)})[1]"


@op(1, "fi")
def top_k(d: Draw, x: Value) -> str:
    return f"lax.top_k({x}, {d.int(1, min(5, x.shape[-1]))})[{d.int(0, 1)}]"


@op(1, "f", ranks=(1, 2))
def searchsorted(d: Draw, x: Value) -> str:
    return d.one(f"jnp.searchsorted(jnp.sort(jnp.ravel({x})), jnp.linspace(-2, 2, {d.one(5, 8, 12)}))",
                 f"jnp.digitize({x}, jnp.linspace(-2, 2, {d.one(5, 8)}))")  # fmt: skip


@op(1, "f", rounds=True)
def quantile(d: Draw, x: Value) -> str:
    return d.one(f"jnp.median({x}, axis={d.axis(x)})", f"jnp.quantile({x}, 0.3, axis={d.axis(x)})")


# ---- sums


@op(2, "fi", rounds=True, gradient=None)
def cumulative(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    reverse = d.one("", "", ", reverse=True")
    kinds = ["cumsum", "cumsum", "cummax", "cummin"] + ["cumlogsumexp"] * (x.dtype == "float32")
    return d.one(
        f"lax.{d.one(*kinds)}({x}, {axis}{reverse})",
        f"lax.cumprod(jnp.cos({x}), {axis}{reverse})",
        f"jnp.cumsum({x}, {axis})",
    )


@op(1, "f", rounds=True)
def associative_scan(d: Draw, x: Value) -> str:
    how = d.one("jnp.add", "jnp.maximum", "lambda a, b: 0.5 * a * b + b")
    if d.coin(0.3):
        pair = f"(jnp.tanh({x}), {d.other(x)})"
        how = "lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])"
        return f"lax.associative_scan({how}, {pair}, axis={d.axis(x)})[1]"
    how = how if how.startswith("jnp") else "jnp.add"
    return f"lax.associative_scan({how}, {x}, axis={d.axis(x)}{d.one('', ', reverse=True')})"


@op(3, EVERY, rounds=True, gradient=None)
def reduction(d: Draw, x: Value) -> str:
    axis = d.one(d.axis(x), d.axis(x), "None", tuple(range(x.rank)))
    keep = d.one("", ", keepdims=True")
    if x.dtype == "bool":
        return f"jnp.{d.one('any', 'all', 'sum')}({x}, axis={axis}{keep})"
    names = {"int32": ["sum", "max", "min", "prod"], "complex64": ["sum", "mean", "prod"],
             "float32": ["sum", "sum", "max", "min", "mean", "prod", "var", "std", "ptp"]}[x.dtype]  # fmt: skip
    name = d.one(*names)
    if name == "prod" and x.dtype == "complex64" and math.prod(x.shape) > 256:
        name = "sum"  # a part of so many factors can overflow, beside a zero: the order of factors decides about NaN
    return f"jnp.{name}({x}, axis={axis}{keep})"


@op(1, "f", rounds=True)
def normalised(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    return d.one(
        f"jax.nn.softmax({x}, axis={axis})",
        f"jax.nn.log_softmax({x}, axis={axis})",
        f"jax.nn.logsumexp({x}, axis={axis})",
        f"{x} - {x}.mean({axis}, keepdims=True)",
        f"{x} / (1 + jnp.linalg.norm({x}, axis={axis}, keepdims=True))",
        f"jax.nn.standardize({x}, axis={axis})",
        f"{x} - {x}.max({axis}, keepdims=True)",
    )


@op(1.5, "fi")
def argmax(d: Draw, x: Value) -> str:
    return f"jnp.{d.one('argmax', 'argmin')}({x}, axis={d.one(d.axis(x), None)})"


@op(2, "f", rounds=True, gradient=None)
def reduce_window(d: Draw, x: Value) -> str:
    window = tuple(d.one(1, 2, 2, 3, 3, 4, 5) for _ in x.shape)
    strides = tuple(d.one(1, 1, 2, 3) for _ in x.shape)
    padding = d.one('"VALID"', '"SAME"', str([(d.int(0, 2), d.int(0, 2)) for _ in x.shape]))
    init, how = d.one(("0.0", "lax.add"), ("-jnp.inf", "lax.max"), ("jnp.inf", "lax.min"))
    more = ""
    if d.coin(0.2):
        more += f", window_dilation={tuple(d.int(1, 2) for _ in x.shape)}"
    if d.coin(0.2) and how == "lax.add":
        more += f", base_dilation={tuple(d.int(1, 2) for _ in x.shape)}"
    return f"lax.reduce_window({x}, {init}, {how}, {window}, {strides}, {padding}{more})"


@op(1, "f", ranks=(1,), rounds=True)
def convolve(d: Draw, x: Value) -> str:
    kernel = d.one("jnp.ones(3) / 3", "jnp.array([1.0, 2.0, -1.0, 0.5])", f"{x}[:{d.int(1, 5)}]", "jnp.ones(5) / 5")
    return f"jnp.{d.one('convolve', 'correlate')}({x}, {kernel}, mode={d.one('full', 'same', 'valid')!r})"


@op(2, "f", rounds=True)
def convolution(d: Draw, x: Value) -> str:
    spatial = d.one(1, 2) if x.rank > 1 else 1
    lead = x.rank - spatial
    if lead > 2:
        raise NoFit
    image = f"{x}[{', '.join(['None'] * (2 - lead) + [':'] * x.rank)}]" if lead < 2 else x.name
    channels = x.shape[-spatial - 1] if lead else 1
    groups = d.one(*(g for g in (1, 1, 1, 2, 4, channels) if channels % g == 0 and channels <= 64))
    out = groups * d.one(1, 2)
    kernel = (out, channels // groups, *(d.one(1, 2, 3, 3, 5) for _ in range(spatial)))
    strides = tuple(d.one(1, 1, 2) for _ in range(spatial))
    padding = d.one("'SAME'", "'VALID'", str([(d.int(0, 2), d.int(0, 2)) for _ in range(spatial)]))
    more = f", rhs_dilation={(2,) * spatial}" if d.coin(0.2) else ""
    if d.coin(0.2) and padding.startswith("["):
        more += f", lhs_dilation={(2,) * spatial}"
    if groups > 1:
        more += f", feature_group_count={groups}"
    weights = f"jnp.cos(jnp.arange({math.prod(kernel)}.0)).reshape({kernel})"
    return f"lax.conv_general_dilated({image}, {weights}, {strides}, {padding}{more})"


@op(1, "f", ranks=(2, 3), rounds=True)
def pooling(d: Draw, x: Value) -> str:
    window = (1,) * (x.rank - 2) + (d.int(2, 3), d.int(2, 3))
    strides = (1,) * (x.rank - 2) + (d.int(1, 3), d.int(1, 3))
    init, how = d.one(("0.0", "lax.add"), ("-jnp.inf", "lax.max"))
    return f"lax.reduce_window({x}, {init}, {how}, {window}, {strides}, {d.one('SAME', 'VALID')!r})"


@op(2, "fc", ranks=(2, 3), rounds=True)
def einsum(d: Draw, x: Value) -> str:
    y = d.other(x)
    if x.rank == 2:
        return d.one(
            f"jnp.einsum('ij,kj->ik', {x}, {y})",
            f"jnp.einsum('ij,ij->i', {x}, {y})",
            f"{x}.T @ {y}",
            f"{x} @ {y}.T",
            f"{x} @ jnp.sin(jnp.arange({8 * x.shape[1]}.0)).reshape({x.shape[1]}, 8)",
            f"jnp.einsum('ij,ik->jk', {x}, {y})",
            f"jnp.cos(jnp.arange({x.shape[0]}.0)) @ {x}",
        )
    return d.one(
        f"jnp.einsum('bij,bkj->bik', {x}, {y})",
        f"jnp.einsum('bij,bij->bj', {x}, {y})",
        f"jnp.einsum('bij,cij->bc', {x}, {y})",
    )


@op(1, "fc", ranks=(1,), rounds=True)
def vector_product(d: Draw, x: Value) -> str:
    return d.one(f"jnp.dot({x}, {d.other(x)})", f"jnp.outer({x}, {x}[:8])", f"jnp.vdot({x}, {d.other(x)})")


@op(1, "fc", rounds=True)
def fft(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    if x.dtype == "float32" and d.coin():
        return d.one(
            f"jnp.fft.rfft({x}, axis={axis})", f"jnp.fft.fft({x}, axis={axis}).real", f"jnp.fft.fftshift({x}, {axis})"
        )
    names = ["fft", "ifft"] + ["fft2"] * (x.rank > 1)
    name = d.one(*names)
    if name == "fft2":
        return f"jnp.fft.fft2({x})"
    return f"jnp.fft.{name}({x}, axis={axis})"


# ---- elements and shapes


@op(1, EVERY)
def convert(d: Draw, x: Value) -> str:
    if x.dtype == "bool":
        return d.one(f"{x}.astype(jnp.float32)", f"{x}.astype(int)", f"~{x}")
    if x.dtype == "complex64":
        return d.one(f"jnp.abs({x} + 3)", f"jnp.real({x})", f"jnp.imag({x})", f"jnp.conj({x})")
    if x.dtype == "int32":
        return d.one(f"{x}.astype(jnp.float32)", f"{x} > 5", f"{x} % 5", f"{x} // 3", f"-{x}")
    return d.one(f"{x} > 0", f"lax.complex({x}, {d.other(x)})", f"jnp.round({x})", f"jnp.floor({x}).astype(int)")


@op(1, "f", rounds=True)
def activation(d: Draw, x: Value) -> str:
    name = d.one("relu", "relu6", "softplus", "silu", "elu", "leaky_relu")
    return d.one(f"jax.nn.{name}({x})", f"jax.nn.{name}({x})", f"jnp.logaddexp({x}, {d.other(x)})")


@op(1, "f", rounds=True)
def increasing(d: Draw, x: Value) -> str:
    """Of neighbours of an increasing array, what has no value for the last and the first one."""
    axis = d.axis(x)
    rises = f"jnp.diff(jnp.cumsum(jnp.abs({x}) + 0.1, {axis}), axis={axis})"
    return d.one(f"jnp.log({rises})", f"jnp.sqrt({rises})", f"{x}.mean() * jnp.sqrt({rises})")


@op(0.5, "fc", rounds=True)
def scaled(d: Draw, x: Value) -> str:
    return d.one(f"{x} * jnp.tanh({x}.real.mean())", f"{x} / (1 + jnp.abs({x}).max())")


@op(2, "fic", rounds=True)
def binary(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    row = f"{x}[{at(x, axis, d.one(':1', '-1:'))}]"
    y = d.one(d.other(x), d.other(x), row, f"{x}.sum({axis}, keepdims=True)")
    forms = [f"{x} + {y}", f"{x} - {y}", f"{x} * {y}"]
    return d.one(*forms, *([f"jnp.maximum({x}, {y})", f"jnp.minimum({x}, {y})"] if x.dtype != "complex64" else []))


@op(0.7, EVERY, ranks=(1, 2))
def broadcast(d: Draw, x: Value) -> str:
    return d.one(f"jnp.broadcast_to({x}, {(d.int(2, 8), *x.shape)})", f"{x}[..., None] * jnp.ones(4, {x}.dtype)" if x.dtype != "bool" else f"{x}[None]",
                 f"jnp.expand_dims({x}, {d.int(0, x.rank)})")  # fmt: skip


@op(0.7, EVERY, ranks=(2,))
def triangle(d: Draw, x: Value) -> str:
    return d.one(
        f"jnp.tril({x}, {d.int(-2, 2)})",
        f"jnp.triu({x}, {d.int(-2, 2)})",
        f"jnp.diagonal({x}, {d.int(-2, 2)})",
        f"jnp.rot90({x})",
    )


@op(0.5, "f", ranks=(1,))
def diagonal_matrix(d: Draw, x: Value) -> str:
    return f"jnp.diag({x}[:{min(x.shape[0], 24)}], {d.int(-2, 2)})"


@op(1, "f", ranks=(1,), rounds=True)
def interp(d: Draw, x: Value) -> str:
    n = x.shape[0]
    return d.one(f"jnp.interp(jnp.linspace(0.3, {n - 0.7}, {d.one(8, 12, n)}), jnp.arange({n}.0), {x})",
                 f"jnp.interp({x}, jnp.linspace(-2, 2, 9), jnp.sin(jnp.arange(9.0)))")  # fmt: skip


@op(0.7, "f", rounds=True)
def resize(d: Draw, x: Value) -> str:
    shape = tuple(d.one(n, n // 2 or 1, n * 2) if math.prod(x.shape) < 800 else n // 2 or 1 for n in x.shape)
    return f"jax.image.resize({x}, {shape}, {d.one('nearest', 'linear', 'cubic')!r})"


@op(0.7, "f", rounds=True)
def numeric(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    forms = [
        f"jnp.trapezoid({x}, axis={axis})",
        f"jnp.average({x}, axis={axis})",
        f"jnp.nan_to_num({x})",
        f"jnp.cumsum({x}, {axis})[::-1]",
    ]
    if x.rank == 2:
        forms += [f"jnp.cov({x})", f"jnp.cross({x}[:, :3], {x}[:, 1:4])"]
    if x.rank == 1:
        forms += [f"jnp.polyval({x}[:4], {x})", f"jnp.ediff1d({x})", f"jnp.vander({x}[:8], 4)"]
    return d.one(*forms)


@op(0.5, "f")
def random_numbers(d: Draw, x: Value) -> str:
    key = f"jax.random.key({d.int(0, 9)})"
    return d.one(f"{x} + jax.random.normal({key}, {x.shape})", f"jax.random.permutation({key}, {x}, axis={d.axis(x)})",
                 f"jnp.where(jax.random.bernoulli({key}, 0.5, {x.shape}), {x}, 0.0)")  # fmt: skip


# ---- control flow and transformations


@op(2, "f", rounds=True, gradient=None)
def fori_loop(d: Draw, x: Value) -> str:
    if d.depth:
        raise NoFit
    return f"lax.fori_loop(0, {d.int(2, 5)}, lambda i, u: {d.body(x.shape, x.dtype)}, {x})"


@op(1.5, "f", rounds=True, gradient=None)
def scan(d: Draw, x: Value) -> str:
    if d.depth:
        raise NoFit
    if x.rank > 1 and d.coin():
        body = d.body(x.shape[1:], x.dtype)
        return f"lax.scan(lambda u, r: (0.5 * ({body}) + r, u * r), {x}[0], {x})[{d.int(0, 1)}]"
    if d.coin(0.5):
        row = x.shape[1:]
        return f"lax.scan(lambda b, r: ((n := b.at[:-1].set(b[1:]).at[-1].set(r)), n.sum()), {x}, jnp.ones({(5, *row)}))[{d.int(0, 1)}]"
    return f"lax.scan(lambda u, _: ({d.body(x.shape, x.dtype)}, u[:1]), {x}, None, length={d.int(2, 4)})[{d.int(0, 1)}]"


@op(0.7, "fi", gradient=False, rounds=True)
def while_loop(d: Draw, x: Value) -> str:
    if d.depth:
        raise NoFit
    return f"lax.while_loop(lambda c: c[0] < {d.int(2, 4)}, lambda c: (c[0] + 1, (lambda u: {d.body(x.shape, x.dtype)})(c[1])), (0, {x}))[1]"


@op(0.7, "f", gradient=None)
def cond(d: Draw, x: Value) -> str:
    if d.depth:
        raise NoFit
    yes, no = d.body(x.shape, x.dtype), d.body(x.shape, x.dtype)
    return f"lax.cond(jnp.ravel({x})[{d.int(0, 7)}] > 0, lambda u: {yes}, lambda u: {no}, {x})"


@op(1, "f", rounds=True, gradient=None)
def checkpoint(d: Draw, x: Value) -> str:
    if d.depth:
        raise NoFit
    return f"jax.checkpoint(lambda u: {d.body(x.shape, x.dtype, static=False)})({x})"


@op(1.5, "fi", ranks=(2, 3), rounds=True, gradient=None)
def vmap(d: Draw, x: Value) -> str:
    if d.depth:
        raise NoFit
    axis = d.axis(x)
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    return f"jax.vmap(lambda u: {d.body(shape, x.dtype, static=False)}, in_axes={axis}, out_axes={d.one(0, axis)})({x})"


@op(0.7, "f", ranks=(2, 3), rounds=True, gradient=None)
def map_(d: Draw, x: Value) -> str:
    if d.depth:
        raise NoFit
    return f"lax.map(lambda u: {d.body(x.shape[1:], x.dtype)}, {x})"


@op(1, "f", rounds=True, gradient=None)
def nested_shard(d: Draw, x: Value) -> str:
    if d.depth:
        raise NoFit
    body = d.body(x.shape, x.dtype, static=False)
    return f"shard(lambda u: {body}, ({d.strategy(x.shape)},))({x})"

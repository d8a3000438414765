"""Static movements of data, and arithmetic between neighbours, as rows of the table of ops."""

from __future__ import annotations

from tests.fuzz.drawing import Draw, NoFit, Value, op

EVERY = "fibc"


def at(x: Value, axis: int, *texts: str) -> str:
    """An index of a value that says something of one axis alone."""
    return ", ".join([*[":"] * axis, *texts])


def scale(d: Draw, text: str, x: Value) -> str:
    return text if x.dtype == "bool" or d.coin() else f"2 * {text}"


@op(4, EVERY, is_static=True)
def slice_(d: Draw, x: Value) -> str:
    texts = [d.cut(n)[0] if d.coin(0.6) else ":" for n in x.shape]
    if d.coin(0.15) and x.rank > 1:
        texts[d.axis(x)] = str(d.int(-2, 3))
    return f"{x}[{', '.join(texts)}]"


@op(1, EVERY, is_static=True)
def lax_slice(d: Draw, x: Value) -> str:
    starts = [d.one(0, 1, d.int(0, n - 1)) for n in x.shape]
    limits = [d.one(n, d.int(s + 1, n)) for s, n in zip(starts, x.shape, strict=True)]
    return f"lax.slice({x}, {starts}, {limits}, {[d.one(1, 1, 2, 3) for _ in starts]})"


@op(3, EVERY, is_static=True)
def lax_pad(d: Draw, x: Value) -> str:
    widths = []
    for n in x.shape:
        low, high, inner = d.one(0, 1, 2, 3, -1, -2), d.one(0, 1, 2, 3, -1, -2), d.one(0, 0, 0, 1, 2)
        widths.append((low, high, inner) if d.coin(0.7) and n + (n - 1) * inner + low + high > 0 else (0, 0, 0))
    return f"lax.pad({x}, jnp.array({d.number(x)}, {x}.dtype), {widths})"


@op(3, is_static=True, gradient=None)
def jnp_pad(d: Draw, x: Value) -> str:
    widths = tuple((d.int(0, 3), d.int(0, 3)) if d.coin(0.7) else (0, 0) for _ in x.shape)
    mode = d.one("constant", "constant", "edge", "reflect", "symmetric", "wrap", "linear_ramp")
    if mode == "linear_ramp" and x.dtype != "float32":
        mode = "edge"
    more = f", constant_values={d.number(x)}" if mode == "constant" and d.coin() else ""
    return f"jnp.pad({x}, {widths}, mode={mode!r}{more})"


@op(0.5, "f", is_static=True, rounds=True, gradient=None)
def pad_statistic(d: Draw, x: Value) -> str:
    return f"jnp.pad({x}, {tuple((d.int(0, 2), d.int(0, 2)) for _ in x.shape)}, mode={d.one('mean', 'maximum', 'minimum')!r})"


@op(3, EVERY, is_static=True)
def concatenate(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    others = [v for v in d.values if v.dtype == x.dtype and v.rank == x.rank and v.shape[:axis] == x.shape[:axis]
              and v.shape[axis + 1 :] == x.shape[axis + 1 :]]  # fmt: skip
    other = d.one(*others, x)
    parts = [x.name, scale(d, f"{other}[{at(x, axis, d.cut(other.shape[axis])[0])}]", x)]
    d.rng.shuffle(parts)
    if d.coin(0.2):
        parts.append(f"{x}[{at(x, axis, d.cut(x.shape[axis], plain=True)[0])}]")
    return f"jnp.concatenate([{', '.join(parts)}], {axis})"


@op(1, EVERY, ranks=(1, 2), is_static=True)
def stack(d: Draw, x: Value) -> str:
    return f"jnp.stack([{x}, {d.other(x)}], {d.int(0, x.rank)})"


@op(1, EVERY, ranks=(2, 3), is_static=True)
def components(d: Draw, x: Value) -> str:
    """Rows along a dimension, each moved by itself, and put together again."""
    rows, index, dim = x.shape[0], d.one("x[k]", "x[k : k + 1]"), d.int(1, x.rank - 1)
    if rows > 24:
        raise NoFit
    axis = dim - (index == "x[k]")
    moved = d.one(f"jnp.roll({index}, k % 3 - 1, {axis})", f"{index}.at[{':, ' * axis}k % 2].set({d.number(x)})")
    whole = f"(lambda x: jnp.{'stack' if index == 'x[k]' else 'concatenate'}([{moved} for k in range({rows})]))({x})"
    at_k = f"p[(k, *[slice(None)] * {dim - 1}, slice(k % 3, k % 3 + {x.shape[dim]}))]"
    pads = [(1, 1) if i == dim else (0, 0) for i in range(x.rank)]
    pulled = (
        f"(lambda p: jnp.stack([{at_k} for k in range({rows})]))(jnp.pad({x}, {pads}, mode={d.one('wrap', 'edge')!r}))"
    )
    updated = f"{x}.at[{d.int(0, rows - 1)}].set(jnp.roll({x}[{d.int(0, rows - 1)}], {d.one(1, -1)}, {dim - 1}))"
    return d.one(whole, whole, pulled, updated)


@op(1, EVERY, is_static=True)
def interleave(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    shape = (*x.shape[:axis], 2 * x.shape[axis], *x.shape[axis + 1 :])
    return f"jnp.stack([{x}, {d.other(x)}], {axis + 1}).reshape({shape})"


@op(2, EVERY, is_static=True)
def roll(d: Draw, x: Value) -> str:
    if x.rank > 1 and d.coin(0.2):
        return f"jnp.roll({x}, ({d.int(-3, 3)}, {d.int(-3, 3)}), (0, 1))"
    return f"jnp.roll({x}, {d.one(1, -1, 2, -2, 3, d.int(0, 40))}, {d.axis(x)})"


@op(1, EVERY, is_static=True)
def flip(d: Draw, x: Value) -> str:
    return f"jnp.flip({x}, {d.axis(x)})"


@op(1, EVERY, is_static=True)
def split(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    return f"jnp.split({x}, [{d.int(1, x.shape[axis] - 1)}], {axis})[{d.int(0, 1)}]"


def method(d: Draw, x: Value) -> str:
    """A method of `.at[...]` and the start of its call."""
    if x.dtype == "bool":
        return "set"
    return d.one(*["set"] * 6, *["add"] * 3, "multiply", *(["min", "max"] if x.dtype != "complex64" else []))


@op(8, EVERY, is_static=True, gradient=None)
def at_slice(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    size = x.shape[axis]
    text, length = d.cut(size)
    index = at(x, axis, text)
    if d.coin(0.3) and x.rank > 1:  # another dimension too: an inner block
        other = d.one(*(a for a in range(x.rank) if a != axis))
        texts = [":"] * x.rank
        texts[axis], texts[other] = text, d.cut(x.shape[other])[0]
        return f"{x}.at[{', '.join(texts)}].{method(d, x)}({d.number(x)})"
    if d.coin(0.1) and x.dtype == "float32":
        return f"{x}.at[{index}].apply({d.one('jnp.sin', 'jnp.tanh', 'lambda y: 2 * y')})"
    value = d.number(x) if d.coin(0.4) else scale(d, f"{d.one(x, d.other(x))}[{at(x, axis, d.run(size, length))}]", x)
    return f"{x}.at[{index}].{method(d, x)}({value})"


@op(5, EVERY, is_static=True, gradient=None)
def at_element(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    size = x.shape[axis]
    index = d.one(0, -1, 0, -1, 1, -2, d.int(0, size - 1))
    value = d.number(x) if d.coin(0.6) else f"{x}[{at(x, axis, str(d.int(0, size - 1)))}]"
    if x.rank > 1 and d.coin(0.2):
        return f"{x}.at[{d.int(-2, 2)}, {d.int(-2, 2)}].{method(d, x)}({d.number(x)})"
    return f"{x}.at[{at(x, axis, str(index))}].{method(d, x)}({value})"


@op(2, EVERY, is_static=True, gradient=None)
def at_shift(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    k = d.one(1, 1, 2, 3)
    to, of = d.one((f":-{k}", f"{k}:"), (f"{k}:", f":-{k}"))
    return f"{x}.at[{at(x, axis, to)}].{method(d, x)}({x}[{at(x, axis, of)}])"


@op(2, EVERY, is_static=True, gradient=None)
def at_indices(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    size = x.shape[axis]
    how = method(d, x)
    length = d.one(1, 2, 3, 4, size // 2, size)
    if how == "set":
        index, mode = d.indices(size, length, unique=True), ""
        if d.coin(0.2):
            index, mode = f"jnp.array([{size}, 1, {size + 3}])", ', mode="drop"'
    else:
        outside = d.coin(0.3)
        index = d.indices(size, length, outside=outside)
        mode = f', mode="{d.one("drop", "clip", "fill", "drop")}"' if outside else ""
        if "clip" in mode and how in ("multiply", "max", "min"):  # JAX's gradients of these are wrong, unsharded too
            mode = ', mode="drop"'
    value = d.number(x) if d.coin(0.7) else f"{x}[{at(x, axis, str(d.int(0, size - 1)))}]"
    value = value if x.rank == 1 or axis == 0 or value == d.number(x) else d.number(x)
    return f"{x}.at[{at(x, axis, index)}].{how}({value}{mode})"


@op(3, "fi", is_static=True)
def neighbours(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    left, mid, right = (f"{x}[{at(x, axis, t)}]" for t in (":-2", "1:-1", "2:"))
    first, last = (f"{x}[{at(x, axis, t)}]" for t in (":-1", "1:"))
    c = d.one("0.2", "0.5") if x.dtype == "float32" else "3"
    return d.one(
        f"{last} - {first}",
        f"{c} * ({last} + {first})",
        f"{left} + {right} - 2 * {mid}",
        f"{x}.at[{at(x, axis, '1:-1')}].add({c} * ({left} + {right} - 2 * {mid}))",
        f"{x}.at[{at(x, axis, '1:')}].add(-{c} * ({last} - {first}))",
        f"{x}.at[{at(x, axis, ':-1')}].set({c} * ({last} + {first}))",
        f"jnp.maximum(jnp.maximum({left}, {mid}), {right})",
        f"{x} + {c} * (jnp.roll({x}, 1, {axis}) - jnp.roll({x}, -1, {axis}))",
        f"{first} * {last}",
    )


@op(1, "f", ranks=(2,), is_static=True)
def five_points(d: Draw, x: Value) -> str:
    star = f"0.2 * ({x}[2:, 1:-1] + {x}[:-2, 1:-1] + {x}[1:-1, 2:] + {x}[1:-1, :-2] - 4 * {x}[1:-1, 1:-1])"
    return d.one(star, f"{x}.at[1:-1, 1:-1].add({star})", f"jnp.pad({star}, 1)")


@op(2, "fic", is_static=True)
def aligned(d: Draw, x: Value) -> str:
    """Two values of different sizes, each sliced to what both have."""
    others = [v for v in d.values if v.rank == x.rank and v.dtype == x.dtype and v.name != x.name]
    if not others:
        raise NoFit
    y = d.one(*others)
    texts: tuple[list[str], list[str]] = ([], [])
    for n, m in zip(x.shape, y.shape, strict=True):
        length = min(n, m)
        texts[0].append(":" if n == length else d.run(n, length))
        texts[1].append(":" if m == length else d.run(m, length))
    sign = d.one("+", "-", "*")
    return f"{x}[{', '.join(texts[0])}] {sign} {y}[{', '.join(texts[1])}]"


@op(2, "f", is_static=True, rounds=True)
def elementwise(d: Draw, x: Value) -> str:
    return d.one(f"jnp.sin({x})", f"jnp.tanh({x})", f"1.5 * {x}", f"{x} + 1", f"jnp.exp(-jnp.abs({x}))", f"{x} ** 2",
                 f"jax.nn.relu({x})", f"jnp.sqrt(jnp.abs({x}) + 1)", f"jnp.clip({x}, -1, 1)", f"jax.nn.sigmoid({x})")  # fmt: skip


@op(1.5, EVERY, is_static=True)
def select(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    place = f"jnp.arange({x.shape[axis]})" + f"[:, {', '.join(['None'] * (x.rank - axis - 1))}]" * (x.rank - axis > 1)
    size = x.shape[axis]
    rule = d.one(f"{place} < {d.int(1, size)}", f"{place} == {d.int(0, size - 1)}", f"{place} % {d.int(2, 3)} == 0")
    return f"jnp.where({rule}, {x}, {d.one(d.other(x), d.number(x))})"


@op(1, "fi", is_static=True)
def diff(d: Draw, x: Value) -> str:
    more = d.one("", "", f", append={d.number(x)}", f", prepend={d.number(x)}", ", n=2")
    return f"jnp.diff({x}, axis={d.axis(x)}{more})"


@op(1, "f", is_static=True)
def gradient(d: Draw, x: Value) -> str:
    return f"jnp.gradient({x}, axis={d.axis(x)})"


@op(2, EVERY, is_static=True)
def dynamic_slice_at_constant(d: Draw, x: Value) -> str:
    sizes = [d.one(n, n, d.int(1, n)) for n in x.shape]
    starts = [d.int(0, n - s) if d.coin(0.8) else d.int(-2, n) for s, n in zip(sizes, x.shape, strict=True)]
    return f"lax.dynamic_slice({x}, {starts}, {sizes})"


@op(1, EVERY, ranks=(2, 3), is_static=True)
def element(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    return f"{x}[{at(x, axis, str(d.int(-2 * x.shape[axis], 2 * x.shape[axis])))}]"


@op(2, EVERY, is_static=True)
def dynamic_update_slice_at_constant(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    text, length = d.cut(x.shape[axis], plain=True)
    part = scale(d, f"{d.one(x.name, d.other(x))}[{at(x, axis, text)}]", x)
    start = d.int(0, x.shape[axis] - length) if d.coin(0.8) else d.int(-2, x.shape[axis])
    return f"lax.dynamic_update_slice({x}, {part}, {tuple(start if a == axis else 0 for a in range(x.rank))})"


@op(0.7, EVERY, is_static=True)
def insert(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    size = x.shape[axis]
    return d.one(
        f"jnp.insert({x}, {d.int(0, size - 1)}, {d.number(x)}, axis={axis})",
        f"jnp.delete({x}, {d.int(0, size - 1)}, axis={axis})",
        f"jnp.append({x}, {x}[{at(x, axis, '-1:')}], axis={axis})",
    )


@op(1, EVERY, is_static=True)
def repeat(d: Draw, x: Value) -> str:
    return f"jnp.repeat({x}, {d.int(2, 3)}, axis={d.axis(x)})"


@op(1, EVERY, is_static=True)
def tile(d: Draw, x: Value) -> str:
    return f"jnp.tile({x}, {tuple(d.one(1, 1, 2, 3) for _ in x.shape)})"


@op(1, EVERY, is_static=True)
def transpose(d: Draw, x: Value) -> str:
    order = list(range(x.rank))
    d.rng.shuffle(order)
    return d.one(f"jnp.transpose({x}, {order})", f"jnp.swapaxes({x}, 0, -1)", f"{x}.T")


@op(2, EVERY, is_static=True)
def reshape(d: Draw, x: Value) -> str:
    axis = d.axis(x)
    n = x.shape[axis]
    forms = [(-1,)]
    for k in (2, 3, 4, 5, 7):
        if n % k == 0:
            forms += [
                (*x.shape[:axis], k, n // k, *x.shape[axis + 1 :]),
                (*x.shape[:axis], n // k, k, *x.shape[axis + 1 :]),
            ]
    if axis + 1 < x.rank:
        forms += [(*x.shape[:axis], n * x.shape[axis + 1], *x.shape[axis + 2 :])] * 2
    return f"{x}.reshape({d.one(*forms)})"

"""Rules of ops on elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardfn.movement.emit import Emitter, frame_of
from shardfn.movement.rules.call import Call
from shardfn.movement.values import Elementwise, Lazy, Moved, Part, Spread, Squeezed, Value, alignments, scalar_of

_FINITE = frozenset(
    {"add", "add_any", "sub", "neg", "abs", "max", "min", "sign", "clamp", "select_n", "convert_element_type", "copy", "real",
     "imag", "conj", "complex", "floor", "ceil", "round", "reduce_precision"}
)  # fmt: skip
"""Their derivatives are finite for all operands, and so are those of `mul` with a number."""


def elementwise_rule(call: Call) -> Value | None:
    """An op on elements, if a value that it takes is moved, or none is an array."""
    shapes = {tuple(np.shape(o)) for o in call.operands} - {()}
    if shapes != {call.shape}:
        return None
    is_moved = any(
        isinstance(o, Squeezed) or any(alignments(o, d) for d in range(len(np.shape(o)))) for o in call.operands
    )
    if not is_moved and any(not isinstance(o, Lazy) and np.shape(o) for o in call.operands):
        return None
    squeezed = {o.dim if isinstance(o, Squeezed) else -1 for o in call.operands if np.shape(o)}
    if len(squeezed) > 1:
        return None
    name = call.eqn.primitive.name
    is_scaled = name == "mul" and any(not np.shape(o) for o in call.operands)
    safe = None if name in _FINITE or is_scaled else 2.0 if name == "acosh" else 0.5

    def bind(arrays: Sequence[Any]) -> Any:
        return call.bound(*arrays)

    (dim,) = squeezed
    if dim >= 0:  # the same op, and then without the dimension
        rows = [o.value if isinstance(o, Squeezed) else o for o in call.operands]
        shape = (*call.shape[:dim], 1, *call.shape[dim:])
        return Squeezed(call.shape, call.dtype, elementwise(bind, rows, shape, call.dtype, call.emitter, safe), dim)
    return elementwise(bind, call.operands, call.shape, call.dtype, call.emitter, safe)


def elementwise(
    bind: Callable[[Sequence[Any]], Any], operands: Sequence[Value], shape: tuple[int, ...], dtype: Any, emitter: Emitter,
    safe: float | None = None,
) -> Value:  # fmt: skip
    """An op on the elements of values. Of values that fit into no frame it is the same op on their parts."""
    found = Elementwise(shape, dtype, bind, tuple(operands), safe)
    if frame_of(found) is None and (apart := _on_parts(bind, operands, dtype, emitter, safe)) is not None:
        return apart
    return found


def _on_parts(
    bind: Callable[[Sequence[Any]], Any], operands: Sequence[Value], dtype: Any, emitter: Emitter, safe: float | None
) -> Value | None:
    """The op on each part of its operands, which have parts of the same rows, or no dimensions."""
    moved = [o for o in operands if np.shape(o)]
    if not moved or not all(isinstance(o, Moved) and o.dim == moved[0].dim and len(o.parts) > 1 for o in moved):
        return None
    forms = {tuple((p.rows, p.first, p.source.shape, scalar_of(p.source) is None) for p in o.parts) for o in moved}
    if len(forms) > 1:
        return None
    parts: list[Part] = []
    for i, part in enumerate(moved[0].parts):
        sources = [o.parts[i].source if np.shape(o) else o for o in operands]
        if scalar_of(part.source) is not None:
            scalars = [scalar_of(s) if np.shape(s) else s for s in sources]
            arrays = [
                jnp.asarray(emitter.array(x), getattr(o, "dtype", None)) for x, o in zip(scalars, operands, strict=True)
            ]
            parts.append(part._replace(source=Spread(part.source.shape, dtype, bind(arrays), ())))
        else:
            same = next((p for p, q in zip(parts, moved[0].parts, strict=False) if q.source is part.source), None)
            made = same.source if same else elementwise(bind, sources, part.source.shape, dtype, emitter, safe)
            parts.append(part._replace(source=made))
    return Moved(moved[0].shape, dtype, moved[0].dim, tuple(parts))

"""What a plan says of its workarounds."""

from __future__ import annotations

from collections.abc import Sequence

from shardfn.planning.workarounds.uneven_movement import Movement
from shardfn.planning.workarounds.wrong_ops import WrongOp


def workaround_note(wrong: Sequence[WrongOp]) -> str:
    """The diagnostic of the workarounds in a plan."""
    said = []
    for kind, note in _NOTES.items():
        lines: dict[str, dict[str, None]] = {}
        for one in wrong:
            if _kind(one) == kind:
                lines.setdefault(one.where, {})[_shapes(one.movement)] = None
        if lines:
            said.append(note.format(", ".join(_place(line, [*filter(None, of)]) for line, of in lines.items())))
    return "; ".join(said)


def _kind(one: WrongOp) -> str:
    if one.is_grouped:
        return "grouped"
    own = one.movement.op if one.movement and one.kind == "movement" else ""
    return own if own in _NOTES else one.kind


def _place(line: str, shapes: Sequence[str]) -> str:
    """A line with the shapes of what is moved there."""
    return (line or "a line that is not known") + (f" ({', '.join(shapes)})" if shapes else "")


def _shapes(movement: Movement | None) -> str:
    return "" if movement is None else f"{movement.op} of {movement.operands[0]} to {movement.result}"


_NOTES = {
    "window": (
        "shardfn gathers the spatial dimensions of the convolutions and pooling gradients at {}: for this sharding XLA computes "
        "wrong values or gradients"
    ),
    "grouped": (
        "shardfn gathers all dimensions of the grouped convolutions at {}: for this sharding XLA computes wrong values or "
        "gradients, or does not compile"
    ),
    "transform": (
        "shardfn gathers the operands and results of the Fourier transforms at {}: for this sharding XLA on CPU compiles "
        "a program that may stop when it runs. To avoid it, shard one dimension that they do not transform"
    ),
    "padding": (
        "shardfn gathers the dimensions that are padded between elements, or cropped, at {}: for this sharding XLA computes "
        "wrong values or does not compile"
    ),
    "scatter": "shardfn pads the updates at {} to even shards: XLA combines the padding of uneven shards with row 0",
    "places": (
        "shardfn gathers the coordinates of the places at {}: if they are sharded, XLA computes wrong values or does not compile"
    ),
    "movement": (
        "shardfn gathers the dimensions along which elements move at {}: their shards are uneven, and XLA may compute wrong "
        "values. To avoid it, use sizes that the number of shards divides, or apply the op that reads these rows to all rows"
    ),
    "rotate": (
        "shardfn gathers the dimensions that are rotated at {}: their operands are sharded otherwise before, and XLA may not "
        "compile it. To avoid it, shard what comes before and after alike"
    ),
    "reduce_window": (
        "shardfn gathers the dimensions of the windows at {}: their results have fewer rows than there are shards, for which XLA "
        "may compute wrong values or end the process"
    ),
    "update": "shardfn puts an optimization barrier before the updates at {}: XLA changes shards that they do not reach",
    "nested": (
        "shardfn puts an optimization barrier before the rotations and concatenations at {}: their operands are rotated or "
        "concatenated too, and in a kernel with a softmax or a mean of rows XLA on GPU computes both wrongly, or does not "
        "compile. JAX 0.12 needs no barrier"
    ),
    "bounds": "shardfn clamps the places of the dynamic slices and updates at {}: XLA forgets to, if their results are sharded",
    "self": "shardfn writes the updates at {} as selects: XLA on CPU reads what it has written, on one device too",
    "product": (
        "shardfn gathers the batch dimensions of the results of the matmuls at {}: for this sharding XLA computes wrong values"
    ),
    "reduction": (
        "shardfn gathers the reduced dimensions at {}: XLA has all-reduces for sums, products, minima and maxima only, and "
        "for `and` and `or` of bools. To avoid it, leave these dimensions unsharded"
    ),
}
"""The diagnostic of a plan by kind, with the lines of the ops."""

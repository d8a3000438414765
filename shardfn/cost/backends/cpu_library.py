"""Reductions that XLA's CPU backend leaves to a library, with the ops that the library call computes too."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from shardfn.ir.model import Op
from shardfn.ir.op_traits import IN_CPU_LIBRARY
from shardfn.ir.partitioned import PartitionedProgram

BY_LIBRARY = 4096
"""Elements from which a sum or maximum of `f32` is a library call (JAX 0.10.2 and 0.12.0.1). The call computes what it
alone reads, if that is in `IN_CPU_LIBRARY`.
"""


_FEW_CHANNELS = 16
"""Channels up to which a convolution is not the library's."""


class CpuLibrary:
    """Looks at one graph.

    Args:
      partitioned: the program.
      readers: by value the ops that read it, in order.
      maker: by value the op that makes it, for ops whose results are needed.
    """

    def __init__(self, partitioned: PartitionedProgram, readers: Mapping[int, Sequence[int]], maker: Mapping[int, int]):
        self.partitioned, self.graph = partitioned, partitioned.graph
        self.readers, self.maker, self.held = readers, maker, frozenset(partitioned.graph.outputs)

    def calls(self) -> dict[int, int]:
        """The ops inside library calls, the last reduction's first, each with the op whose result its call returns."""
        found: dict[int, int] = {}
        for i in sorted(set(self.maker.values()), reverse=True):
            if i not in found and self.is_summed(i):
                root, inside = i, {i}
                ahead = [i]
                while True:
                    while ahead:
                        for v in self.graph.ops[ahead.pop()].inputs:
                            j = self.maker.get(v, -1)
                            if j >= 0 and j not in inside and self.can_join(j, i, found) and self.only_in(j, inside):
                                inside.add(j)
                                ahead.append(j)
                    way = self.on(root, i, found)
                    if not way:
                        break
                    inside.update(way)
                    ahead = list(inside)
                    root = way[-1]
                found.update(dict.fromkeys(inside, root))
        return found

    def on(self, i: int, first: int, taken: Collection[int]) -> list[int]:
        """The op that alone reads what op `i` makes, where the library that began with `first` computes it too, behind broadcasts
        and views of it."""
        way: list[int] = []
        while True:
            (value,) = self.graph.ops[i].outputs
            readers = self.readers.get(value, ())
            if len(readers) != 1 or value in self.held or not self.can_join(readers[0], first, taken):
                return []
            i = readers[0]
            way.append(i)
            op = self.graph.ops[i]
            if op.name != "broadcast_in_dim" and not self.partitioned.is_view(op):
                return way

    def only_in(self, i: int, inside: Collection[int]) -> bool:
        """Whether nothing but the ops in `inside` reads what op `i` makes."""
        (value,) = self.graph.ops[i].outputs
        return value not in self.held and all(r in inside for r in self.readers.get(value, ()))

    def can_join(self, i: int, first: int, taken: Collection[int]) -> bool:
        """Whether the library's call that began with op `first` can compute op `i` too."""
        op, begun = self.graph.ops[i], self.graph.ops[first]
        if i in taken or len(op.outputs) != 1 or op.trips != begun.trips:
            return False
        if op.form and begun.form and op.form[1] != begun.form[1]:
            return False
        if self.partitioned.is_view(op) or op.name == "broadcast_in_dim" or self.is_summed(i):
            return True
        if op.name == "dot_general":
            return self.is_library_product(op)
        if op.name == "convolution":
            return self.is_library_convolution(op)
        (value,) = op.outputs
        return op.name in IN_CPU_LIBRARY and math.prod(self.partitioned.local_shape(value)) >= BY_LIBRARY

    def is_library_product(self, op: Op) -> bool:
        """Whether a product is the library's: of `f32`, and its left operand's summed dim does not stand before its free one."""
        if any(self.graph.values[v].dtype != "f32" for v in (*op.inputs, *op.outputs)) or op.rule is None:
            return False
        free, summed = ([d for d, role in enumerate(op.rule.matmul_roles(0)) if role == wanted] for wanted in (1, 2))
        return len(free) != 1 or len(summed) != 1 or summed[0] > free[0]

    def is_library_convolution(self, op: Op) -> bool:
        """Whether a convolution is the library's: of two-dimensional `f32` images, with more than 16 channels, neither kernel nor
        result larger than the image along any dimension, and without holes in it."""
        shape, (image, kernel) = op.convolution, op.inputs[:2]
        if any(self.graph.values[v].dtype != "f32" for v in (image, kernel, *op.outputs)):
            return False
        if shape is None or len(shape.image) != 2 or shape.in_batches or any(w.spacing != 1 for w in op.window_dims):
            return False
        inside, window, outside = map(self.partitioned.local_shape, (image, kernel, op.outputs[0]))
        (out,) = set(range(4)) - {d for _, d in op.reduced}
        (deep,) = {d for _, d in op.reduced}.difference(shape.kernel)
        groups = next((groups for which, _, groups in shape.grouped if which == 0), 1)
        spatial = zip(shape.image, shape.kernel, shape.result, strict=True)
        fits = all(max(window[k], outside[r]) <= inside[i] for i, k, r in spatial)
        return fits and max(window[deep] * groups, window[out]) > _FEW_CHANNELS

    def is_summed(self, i: int) -> bool:
        """Whether op `i` is a reduction that is left to the library; windows must not overlap, nor skip anything."""
        op = self.graph.ops[i]
        if op.name not in ("reduce", "reduce_window") or len(op.outputs) != 1 or op.combines in ("", "multiply"):
            return False
        if op.name == "reduce_window":
            long = [w for w in op.window_dims if w.extent > 1 or w.stride > 1]
            if not long or any(w.spacing != 1 or (w.extent > 1 and w.stride != w.extent) for w in long):
                return False
        return (self.graph.values[op.inputs[0]].dtype == "f32"
                and math.prod(self.partitioned.local_shape(op.inputs[0])) >= BY_LIBRARY)  # fmt: skip

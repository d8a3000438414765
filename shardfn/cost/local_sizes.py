"""A partitioned program that caches the local shape and bytes of each value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from shardfn.ir.model import PartitionedProgram, dtype_bits


@dataclasses.dataclass(frozen=True)
class Sized(PartitionedProgram):
    """A program that computes each local shape once."""

    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    sizes: dict[int, int] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    known: dict[tuple[object, object], tuple[tuple[int, ...], int]] = dataclasses.field(
        default_factory=dict, repr=False, compare=False
    )

    def local_shape(self, value: int) -> tuple[int, ...]:
        """Shape on one device."""
        if value not in self.shapes:
            self.work_out(value)
        return self.shapes[value]

    def local_bytes(self, value: int) -> int:
        """Bytes on one device."""
        if value not in self.sizes:
            self.work_out(value)
        return self.sizes[value]

    def work_out(self, value: int) -> None:
        """Both, once for all values of one form and layout."""
        form, spec = self.graph.values[value], self.specs[value]
        key = (form.shape, form.dtype), spec
        found = self.known.get(key)
        if found is None:
            shape = super().local_shape(value)
            found = self.known[key] = shape, math.prod(shape) * dtype_bits(form.dtype) // 8
        self.shapes[value] = found[0]
        self.sizes.setdefault(value, found[1])  # what takes more than its elements is told


def sized(partitioned: PartitionedProgram, sizes: Mapping[int, int] | None = None) -> Sized:
    """The program with cached local shapes; with `sizes`, bytes by value where they differ from the elements'."""
    if isinstance(partitioned, Sized) and not sizes:
        return partitioned
    fields = {field.name: getattr(partitioned, field.name) for field in dataclasses.fields(PartitionedProgram)}
    return Sized(**fields, sizes=dict(sizes or {}))

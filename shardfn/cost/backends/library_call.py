"""A call of a library, or an op that XLA makes of many kernels: its work by kind, and its work buffers."""

from __future__ import annotations

from typing import NamedTuple

from shardfn.cost.devices.chips import Chip


class LibraryCall(NamedTuple):
    """The kernels of one op on one device."""

    parts: tuple[tuple[str, float], ...]
    """By kind of kernel (`KINDS`) its work: bytes or FLOPs."""
    work_bytes: float = 0.0
    """Memory that it needs beside its operands and results."""
    in_place: bool = False
    """Whether its results may be written over its operands, the first over the first and so on."""

    def is_known(self, chip: Chip) -> bool:
        """Whether a chip has the rates of all its kinds, but for those that move fewer bytes than memory does in a launch."""
        few = chip.launch_s * chip.memory_bytes_s
        return bool(self.parts) and all(
            chip.kind_rate(kind) is not None or (KINDS[kind] == "memory" and work <= few) for kind, work in self.parts
        )

    def seconds(self, chip: Chip, flops_s: float) -> float:
        """Modelled seconds; of kinds whose rate is unknown those at the chip's own rate, which are the least.

        Args:
          chip: what it runs on.
          flops_s: the chip's rate of FLOPs of this op's dtype.
        """
        return sum(work / (base_rate(kind, chip, flops_s) * (chip.kind_rate(kind) or 1.0)) for kind, work in self.parts)


def base_rate(kind: str, chip: Chip, flops_s: float = 0.0) -> float:
    """The chip's rate of which a kind reaches a part: bytes, FLOPs or launches in a second."""
    what = KINDS[kind]
    if what == "memory":
        return chip.memory_bytes_s
    if what == "elements":
        return chip.vector_flops or chip.flops
    return (flops_s or chip.rate("f32")) if what == "matmul" else 1 / (chip.launch_s or 1e-6)


UNKNOWN = LibraryCall(())
"""The call of an op whose time has no rule that was checked."""


KINDS = {
    "memory": "memory",
    "matmul": "matmul",
    "sort": "memory",
    "bitonic sort": "launches",
    "comparison sort": "elements",
    "top_k of few": "memory",
    "gather": "memory",
    "scatter": "memory",
    "cumulative reduction": "memory",
    "pooling gradient": "memory",
    "fft": "memory",
    "cholesky": "elements",
    "triangular solve of a vector": "memory",
    "reduction": "elements",
    "2D convolution": "matmul",
    "3D convolution": "matmul",
    "3D weight gradient": "matmul",
}
"""What a kind's work is: bytes of memory, FLOPs of elements or of matmuls, or rounds that take a part of a kernel's launch.
`Chip.kind_rates` has the part of the chip's rate of that which the kind reaches; "memory" and "matmul" reach all."""

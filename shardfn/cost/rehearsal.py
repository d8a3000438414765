"""What one device measured of its part of a plan (`Plan.rehearse`), beside what the cost model has."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

from shardfn.ir.source_lines import file_line
from shardfn.render.cells import table, times
from shardfn.render.parts import Part, Table
from shardfn.render.printed import Printed
from shardfn.units import bytes_text, time_text

MOST_KERNELS = 10
"""The costliest kernels that a rehearsal keeps."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The runs of one instruction of the compiled program in one call, as the profiler saw them."""

    op: str
    """The instruction's name in the compiled program, such as `fusion.3`."""
    kernel: str
    """The kernel's own name; of several the costliest one's."""
    where: str
    """The user's line, as `file:line`; empty where XLA kept none."""
    runs: float
    """In one call."""
    seconds: float
    """Of all its runs in one call."""


@dataclasses.dataclass(frozen=True, repr=False)
class Rehearsal(Printed):
    """One device's part of a plan, measured on one device, beside the model's figures. Print it for tables.

    The collectives of a rehearsal send nothing, so what is measured is compute. Communication stays modelled.

    Attributes:
      target: the devices of the plan.
      count: how many they are.
      device: what it was measured on, as JAX names it.
      jax: the version of JAX.
      rounds_s: seconds of one call, by round of several calls in a row.
      compute_s: modelled seconds of compute.
      communication_s: modelled seconds of communication.
      predicted_bytes: predicted peak memory.
      compiled_bytes: arguments, results and temporaries of the compiled program; None where XLA does not say.
      peak_bytes: the most memory in use on the device, arguments included; None where the device does not count it.
      kernels: the costliest kernels, the costliest first; none where the profiler saw none.
      kernels_s: seconds of all kernels of one call.
      notes: what limits these figures.
      layers: where one shard does not fit, which numbers of layers were measured, such as `2 and 4 of 32 layers`: seconds and
        bytes are scaled to all, and the kernels are those of the larger number. Empty where the whole program was measured.

    >>> found = Rehearsal("h100:8", 8, "NVIDIA H100", "0.12.0", (0.0163, 0.0162, 0.0165), 0.0117, 0.004, 5 << 30, 5 << 30)
    >>> f"{found.measured_s:.4f} {found.none_s:.4f} {found.full_s:.4f}"
    '0.0163 0.0203 0.0163'
    >>> print(found)
    Rehearsed on NVIDIA H100: one device of h100:8
    figure                        modelled  measured  ratio
    ----------------------------  --------  --------  -----
    compute                        11.7 ms   16.3 ms   1.39
    communication                     4 ms         -      -
    peak memory, as compiled         5 GiB     5 GiB   1.00
    step, if nothing overlaps      15.7 ms   20.3 ms   1.29
    step, if everything overlaps   11.7 ms   16.3 ms   1.39
    measured in 3 rounds, 16.2 ms to 16.5 ms a call; steps with measured compute and modelled communication; JAX 0.12.0
    """

    target: str
    count: int
    device: str
    jax: str
    rounds_s: tuple[float, ...]
    compute_s: float
    communication_s: float
    predicted_bytes: int
    compiled_bytes: int | None = None
    peak_bytes: int | None = None
    kernels: tuple[Kernel, ...] = ()
    kernels_s: float = 0.0
    notes: tuple[str, ...] = ()
    layers: str = ""

    @property
    def measured_s(self) -> float:
        """Measured seconds of compute in one call: the median of the rounds."""
        return statistics.median(self.rounds_s)

    @property
    def none_s(self) -> float:
        """Seconds of one call if no communication overlaps with compute."""
        return self.measured_s + self.communication_s

    @property
    def full_s(self) -> float:
        """Seconds of one call if all communication overlaps with compute: a lower bound."""
        return max(self.measured_s, self.communication_s)

    def line(self) -> str:
        """The rehearsal in one line."""
        peak = self.compiled_bytes if self.peak_bytes is None else self.peak_bytes
        memory = "" if peak is None else f", peak memory {bytes_text(peak)}"
        scaled = f", {self.layers}, and scaled to all" if self.layers else ""
        return (
            f"compute {time_text(self.measured_s)}{memory}, measured on one {self.device}{scaled}; a call takes "
            f"{time_text(self.full_s)} to {time_text(self.none_s)} with the modelled communication"
        )

    def table(self) -> Table:
        """Measured and modelled figures."""
        modelled = self.compute_s, self.communication_s
        rows = [
            _row("compute", self.compute_s, self.measured_s, time_text),
            _row("communication", self.communication_s, None, time_text),
            _row("peak memory, as compiled", self.predicted_bytes, self.compiled_bytes, bytes_text),
            *([_row("peak memory, in use", self.predicted_bytes, self.peak_bytes, bytes_text)] * (self.peak_bytes is not None)),
            _row("step, if nothing overlaps", sum(modelled), self.none_s, time_text),
            _row("step, if everything overlaps", max(modelled), self.full_s, time_text),
        ]  # fmt: skip
        spread = f"{time_text(min(self.rounds_s))} to {time_text(max(self.rounds_s))} a call"
        note = (
            f"measured in {len(self.rounds_s)} rounds, {spread}; steps with measured compute and modelled communication"
        )
        title = f"Rehearsed on {self.device}: one device of {self.target}"
        scaled = [f"one shard does not fit: {self.layers} were measured, and scaled to all"] if self.layers else []
        notes = "; ".join([note, *scaled, f"JAX {self.jax}", *self.notes])
        return table(title, ("figure", "modelled", "measured", "ratio"), rows, notes)

    def kernel_table(self) -> Table:
        """The costliest kernels with the user's lines."""
        rows = [
            (k.op, k.kernel if k.kernel != k.op else "", times(round(k.runs)), time_text(k.seconds),
             f"{k.seconds / self.kernels_s:.0%}", file_line(k.where))
            for k in self.kernels
        ]  # fmt: skip
        columns = ("instruction", "kernel", "runs", "time", "share", "line")
        note = f"of {time_text(self.kernels_s)} of kernels in one call, by the profiler"
        note += "; the larger of both numbers of layers" if self.layers else ""
        return table("Rehearsed: costliest kernels", columns, rows, note)

    def parts(self) -> list[Part]:
        """Both tables."""
        return [self.table(), *([self.kernel_table()] if self.kernels else [])]

    __repr__ = Printed.__str__

    def _html_title(self) -> str:
        return f"Rehearsal of one device of {self.target}"


def _row(what: str, modelled: float, measured: float | None, text: Callable[[float], str]) -> tuple[str, ...]:
    known = measured is not None
    ratio = f"{measured / modelled:.2f}" if known and modelled else "-"
    return what, text(modelled), text(measured) if known else "-", ratio

"""Ragged matmuls of experts that XLA's GPU backend makes of all rows and the matrices of all experts."""

from __future__ import annotations

from collections.abc import Iterator

from shardfn.cost.backends.gpu_library import GPU_LIBRARY
from shardfn.cost.compute import op_flops, rate
from shardfn.ir.model import is_gpu
from shardfn.ir.source_lines import file_line
from shardfn.planning.call import AnsweredCall
from shardfn.planning.plan import FIX, Plan
from shardfn.units import bytes_text, time_text


def masked_experts(plan: Plan, _: AnsweredCall) -> Iterator[str]:
    """Matmuls of rows with their experts' matrices (`ragged_dot`) that XLA's GPU backend makes of all rows and all matrices."""
    partitioned, chip = plan.partitioned, plan.hardware.chip
    found: dict[str, list[tuple[float, float, float]]] = {}
    for op in partitioned.graph.ops if is_gpu(plan.hardware.platform) else ():
        flops = op_flops(partitioned, op) if op.name == "ragged_dot" else 0.0
        if flops and (call := GPU_LIBRARY[op.name](partitioned, op, flops)):
            seconds = op.trips / rate(partitioned.graph, op, chip)
            row = dict(call.parts)["matmul"] * seconds, flops * seconds, call.work_bytes
            found.setdefault(op.where, []).append(row)
    for where, rows in found.items():
        every_s, once_s, stored = (sum(column) for column in zip(*rows, strict=True))
        yield (
            f"ragged_dot{f' at {file_line(where)}' if where else ''}: on GPUs XLA multiplies each row by all experts' "
            f"matrices, {time_text(every_s)}, and stores {bytes_text(stored)} of masked rows; each expert with rows of its own "
            f"takes {time_text(once_s)};{FIX}give the experts a capacity (`shardfn.experts.dispatch`), and multiply by an einsum"
        )

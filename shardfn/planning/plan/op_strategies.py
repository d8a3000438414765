"""The strategy of each op of a plan, as integers."""

from __future__ import annotations

import dataclasses

from shardfn.ir.model import Op
from shardfn.planning.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class OpStrategy:
    """The strategy of one op: the number of shards of each dimension of its operands and results."""

    op: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    trips: int
    where: str


def op_strategies(plan: Plan) -> tuple[OpStrategy, ...]:
    """The strategy of every op of the partitioned program, in program order."""
    partitioned = plan.partitioned

    def operands(op: Op) -> tuple[int, ...]:  # without the results of a `shard_map`'s body
        return op.inputs[: -len(op.outputs)] if op.name == "shard_map" else op.inputs

    return tuple(
        OpStrategy(
            op.name,
            tuple(map(partitioned.shards, operands(op))),
            tuple(map(partitioned.shards, op.outputs)),
            op.trips,
            op.where,
        )
        for op in partitioned.graph.ops
    )

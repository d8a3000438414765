"""MindSpore's strategy file in its binary form (ProtoBuf), as the rows of its JSON form, and back.

The fields stand in `mindspore_schema`. The binary form has no shapes of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardfn.layoutfile.mindspore_schema import message, parse, unknown_fields

FIRST_BYTE = 0x08
"""The first field, `current_stage`, begins with it. No text does."""

LAYOUTS, STRATEGIES = "parallel_layout_item", "parallel_strategy_item"
_NUMBERS = ("field", "opt_weight_shard_step", "opt_weight_shard_size")


def strategy_rows(data: bytes) -> dict[str, Any]:
    """The content of a binary strategy file, in the form of the JSON.

    Raises:
      ExtraError: the package protobuf is not installed.
      ValueError: it is no strategy file.

    >>> rows = {"current_stage": 1, "parallel_layout_item": {"w": {"dev_matrix": [4, 2], "tensor_map": [-1, 0]}}}
    >>> strategy_rows(strategy_bytes(rows))["parallel_layout_item"]["w"]["tensor_map"]
    [-1, 0]
    """
    found = parse("StrategyMap", data)
    if unknown := unknown_fields(found):
        raise ValueError(f"its field {unknown[0]} is unknown")
    items = [*found.parallel_strategy_item, *found.parallel_layout_item]
    if not all(
        item.ByteSize() and all(item.HasField(field.name) for field in item.DESCRIPTOR.fields) for item in items
    ):
        raise ValueError("an entry has no name, or no strategy")
    strategies = {item.node_name: item.parallel_strategys for item in found.parallel_strategy_item}
    return {
        "current_stage": found.current_stage,
        STRATEGIES: {
            name: {"stage": row.stage, "parallel_strategy": [list(one.dim) for one in row.parallel_strategy]}
            for name, row in strategies.items()
        },
        LAYOUTS: {item.param_name: _layout(item.parallel_layouts) for item in found.parallel_layout_item},
    }


def _layout(row: Any) -> dict[str, Any]:
    if max(len(row.dev_matrix), len(row.tensor_map)) > 1:
        raise ValueError("a parameter has several device matrices")
    return {"dev_matrix": _only(row.dev_matrix), "tensor_map": _only(row.tensor_map),
            **{name: getattr(row, name) for name in _NUMBERS}}  # fmt: skip


def _only(rows: Sequence[Any]) -> list[int]:
    return list(rows[0].dim) if rows else []


def strategy_bytes(rows: Mapping[str, Any]) -> bytes:
    """A binary strategy file with the content of the JSON.

    Raises:
      ExtraError: the package protobuf is not installed.
      ValueError: a dim is sharded over several axes that are not adjacent, which the binary form cannot say.
    """
    made = message("StrategyMap", current_stage=rows.get("current_stage", 1))
    for name, row in rows.get(STRATEGIES, {}).items():
        strategies = message("Strategies", stage=row["stage"], parallel_strategy=map(_dims, row["parallel_strategy"]))
        made.parallel_strategy_item.add(node_name=name, parallel_strategys=strategies)
    for name, row in rows.get(LAYOUTS, {}).items():
        if any(isinstance(dim, list) for dim in row["tensor_map"]):
            raise ValueError(f"`{name}` has a dim that is sharded over several axes")
        layouts = message("Layouts", dev_matrix=[_dims(row["dev_matrix"])], tensor_map=[_dims(row["tensor_map"])],
                          **{key: row.get(key, 0) for key in _NUMBERS})  # fmt: skip
        made.parallel_layout_item.add(param_name=name, parallel_layouts=layouts)
    return made.SerializeToString()


def _dims(values: Sequence[int]) -> Any:
    return message("Dims", dim=values)

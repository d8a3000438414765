"""MindSpore's strategy file in its binary form (ProtoBuf), as the rows of its JSON form, and back.

The fields are those of MindSpore's published schema, `node_strategy.proto`. The binary form has no shapes of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardfn.layoutfile.protobuf import Bytes, Span, fields, integers, message, text

FIRST_BYTE = 0x08
"""The first field, `current_stage`, begins with it. No text does."""

LAYOUTS, STRATEGIES = "parallel_layout_item", "parallel_strategy_item"


def strategy_rows(data: Bytes) -> dict[str, Any]:
    """The content of a binary strategy file, in the form of the JSON.

    Args:
      data: the bytes of the file.

    Raises:
      ValueError: it is no strategy file.

    >>> rows = {"current_stage": 1, "parallel_layout_item": {"w": {"dev_matrix": [4, 2], "tensor_map": [-1, 0]}}}
    >>> strategy_rows(strategy_bytes(rows))["parallel_layout_item"]["w"]["tensor_map"]
    [-1, 0]
    """
    found: dict[str, Any] = {"current_stage": 0, STRATEGIES: {}, LAYOUTS: {}}
    for number, value in fields(data, (0, len(data))):
        if number == 1 and isinstance(value, int):
            found["current_stage"] = value
        elif number in (2, 3) and not isinstance(value, int):
            parts = dict(fields(data, value))
            if not isinstance(inner := parts.get(2), tuple) or 1 not in parts:
                raise ValueError("an entry has no name, or no strategy")
            read = _strategy if number == 2 else _layout
            found[STRATEGIES if number == 2 else LAYOUTS][text(data, parts[1])] = read(data, inner)
        else:
            raise ValueError(f"its field {number} is unknown")
    return found


def _strategy(data: Bytes, span: Span) -> dict[str, Any]:
    every = list(fields(data, span))
    return {
        "stage": next((value for number, value in every if number == 1), 0),
        "parallel_strategy": [_dims(data, value) for number, value in every if number == 2],
    }


def _layout(data: Bytes, span: Span) -> dict[str, Any]:
    every = list(fields(data, span))
    lists = {number: [_dims(data, v) for n, v in every if n == number] for number in (1, 2)}
    if any(len(rows) > 1 for rows in lists.values()):
        raise ValueError("a parameter has several device matrices")
    numbers = {number: value for number, value in every if isinstance(value, int)}
    return {
        "dev_matrix": lists[1][0] if lists[1] else [],
        "tensor_map": lists[2][0] if lists[2] else [],
        "field": numbers.get(5, 0),
        "opt_weight_shard_step": _signed(numbers.get(6, 0)),
        "opt_weight_shard_size": _signed(numbers.get(7, 0)),
    }


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _dims(data: Bytes, value: int | Span) -> list[int]:
    if isinstance(value, int):
        raise ValueError("a number stands where a list should")
    return integers(data, (one for number, one in fields(data, value) if number == 1))


def strategy_bytes(rows: Mapping[str, Any]) -> bytes:
    """A binary strategy file with the content of the JSON.

    Raises:
      ValueError: a dim is sharded over several axes that are not adjacent, which the binary form cannot say.
    """
    parts: list[tuple[int, int | str | bytes]] = [(1, rows.get("current_stage", 1))]
    for name, row in rows.get(STRATEGIES, {}).items():
        of_operands = [(2, _list(dims)) for dims in row["parallel_strategy"]]
        parts.append((2, message((1, name), (2, message((1, row["stage"]), *of_operands)))))
    for name, row in rows.get(LAYOUTS, {}).items():
        if any(isinstance(dim, list) for dim in row["tensor_map"]):
            raise ValueError(f"`{name}` has a dim that is sharded over several axes")
        layout = [(1, _list(row["dev_matrix"])), (2, _list(row["tensor_map"])), (5, row.get("field", 0)),
                  (6, row.get("opt_weight_shard_step", 0)), (7, row.get("opt_weight_shard_size", 0))]  # fmt: skip
        parts.append((3, message((1, name), (2, message(*layout)))))
    return message(*parts)


def _list(values: list[int]) -> bytes:
    return message(*((1, value) for value in values))

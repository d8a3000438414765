"""The messages of MindSpore's binary files, for the package `protobuf`: their fields, by number.

Names and numbers are facts of MindSpore's published `checkpoint.proto` and `node_strategy.proto`; messages and fields that
nothing here needs are left out. Every number is an int64, which reads and writes as their int32 and uint32 do.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from shardfn.errors import ExtraError, fail, with_extra

SCHEMA: dict[str, tuple[tuple[int, str, str], ...]] = {
    # a `.ckpt` file: fields 1 of one message, each a Value
    "Value": ((1, "tag", "string"), (2, "tensor", "Tensor")),
    "Tensor": ((1, "dims", "int64 repeated"), (2, "tensor_type", "string"), (3, "tensor_content", "bytes")),
    # a strategy file: one StrategyMap
    "StrategyMap": ((1, "current_stage", "int64"), (2, "parallel_strategy_item", "StrategyItem repeated"),
                    (3, "parallel_layout_item", "LayoutItem repeated")),
    "StrategyItem": ((1, "node_name", "string"), (2, "parallel_strategys", "Strategies")),
    "Strategies": ((1, "stage", "int64"), (2, "parallel_strategy", "Dims repeated")),
    "LayoutItem": ((1, "param_name", "string"), (2, "parallel_layouts", "Layouts")),
    "Layouts": ((1, "dev_matrix", "Dims repeated"), (2, "tensor_map", "Dims repeated"), (5, "field", "int64"),
                (6, "opt_weight_shard_step", "int64"), (7, "opt_weight_shard_size", "int64")),
    "Dims": ((1, "dim", "int64 repeated"),),
}  # fmt: skip
"""Each message: the number, the name and the type of each field."""

_PACKAGE = "shardfn.mindspore"


def message(name: str, **fields: Any) -> Any:
    """A message of `SCHEMA`.

    Raises:
      ExtraError: the package protobuf is not installed.

    >>> message("Dims", dim=[2, 300]).SerializeToString().hex()
    '080208ac02'
    """
    return _classes()[name](**fields)


def parse(name: str, data: bytes) -> Any:
    """A message of `SCHEMA`, of its bytes.

    Raises:
      ExtraError: the package protobuf is not installed.
      ValueError: they are no message, or truncated.

    >>> list(parse("Dims", bytes([0x0A, 0x02, 0x02, 0x04])).dim)  # another writer may pack the numbers of a list
    [2, 4]
    """
    made = message(name)
    try:
        made.ParseFromString(data)
    except _protobuf("message").DecodeError as error:
        raise ValueError(str(error) or "it is no message") from None
    return made


def unknown_fields(made: Any) -> list[int]:
    """The numbers of a message's fields that `SCHEMA` does not name."""
    return [field.field_number for field in _protobuf("unknown_fields").UnknownFieldSet(made)]


@functools.cache
def _classes() -> dict[str, Any]:
    """The class of each message, made of descriptors: a clone needs no protoc."""
    descriptors = _protobuf("descriptor_pb2")
    proto = descriptors.FieldDescriptorProto
    file = descriptors.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in SCHEMA.items():
        made = file.message_type.add(name=name)
        for number, field, type_ in fields:
            kind, _, repeated = type_.partition(" ")
            row = made.field.add(
                name=field, number=number, label=proto.LABEL_REPEATED if repeated else proto.LABEL_OPTIONAL
            )
            if kind in SCHEMA:
                row.type, row.type_name = proto.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                row.type = proto.Type.Value(f"TYPE_{kind.upper()}")
    pool = _protobuf("descriptor_pool").DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in SCHEMA}
    return {name: _protobuf("message_factory").GetMessageClass(descriptor) for name, descriptor in found.items()}


def _protobuf(module: str) -> Any:
    """A module of the package protobuf.

    Raises:
      ExtraError: it is not installed.
    """
    try:
        return importlib.import_module(f"google.protobuf.{module}")
    except ImportError as error:
        fail(ExtraError, "MindSpore's binary files need protobuf, which is not installed", where=str(error),
             why="it is not installed with the library itself", fix=with_extra("mindspore"))  # fmt: skip

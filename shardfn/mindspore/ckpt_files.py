"""MindSpore's own checkpoint files, `.ckpt`: ProtoBuf messages one after the other, read without MindSpore.

The fields stand in `layoutfile.mindspore_schema`. A file is a sequence of values, each with a name and a tensor (shape, type,
bytes). A large tensor is several values of one name that follow each other, each with the full shape and a part of the bytes.
A scalar has the shape (0,). A checksum may follow. Only descriptions are read when a file is opened: they are parsed by
protobuf, and the bytes of tensors are passed over.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from shardfn.checkpoint.chunks import Box
from shardfn.checkpoint.safetensors_files import FileTensor, read_tensors
from shardfn.errors import CheckpointFileError, fail
from shardfn.files import open_regular
from shardfn.layoutfile.mindspore_schema import parse

SUFFIX = ".ckpt"
Span = tuple[int, int]
"""Where bytes begin and end."""
VALUE, TENSOR, CONTENT = 0x0A, 0x12, 0x1A
"""The keys of the fields with the values of a file, the tensor of a value, the bytes of a tensor: 8 times their number, and 2."""
MOST_BYTES = 1 << 20
"""Bytes of a name, a shape and a type."""
MAGIC = (0x7F3A5ED8, 0x7F3A5ED9, 0x7F3A5EDA)
"""The first four bytes of an encrypted block: AES-GCM, AES-CBC, SM4-CBC."""
CHECKSUM, CHECKSUM_BYTES = b"crc_num", 17
NO_ARRAYS = ("str", "random_op")
"""Types of values that are no arrays: remarks, and the state of random ops."""

DTYPES = {
    name: name.lower()
    for name in ("Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32", "Int64", "UInt64", "Float16", "BFloat16", "Float32",
                 "Float64", "Bool", "Complex64", "Complex128")
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SplitTensor(FileTensor):
    """A tensor whose bytes stand in several parts of a file."""

    parts: tuple[Span, ...] = ()

    def read(self, box: Box) -> np.ndarray:
        """A box of the tensor. The complete tensor is in memory meanwhile."""
        if len(self.parts) == 1:
            return super().read(box)
        with open_regular(self.file) as handle:
            values = b"".join(_part(handle, part) for part in self.parts)
        return np.frombuffer(values, jnp.dtype(self.dtype)).reshape(self.shape)[box].copy()


def _part(handle: BinaryIO, part: Span) -> bytes:
    handle.seek(part[0])
    return handle.read(part[1] - part[0])


def tensors_of(file: pathlib.Path) -> dict[str, FileTensor]:
    """The tensors of a `.ckpt` file, or of safetensors, by name.

    Raises:
      CheckpointFileError: the file is encrypted, truncated, or no checkpoint.
    """
    if file.suffix != SUFFIX:
        return read_tensors(file)
    try:
        with open_regular(file) as handle:
            is_encrypted = int.from_bytes(handle.read(4), "little") in MAGIC
            found = {} if is_encrypted else _tensors(file, handle)
    except (OSError, ValueError) as error:
        fail(CheckpointFileError, f"{file} cannot be read", why=str(error),
             fix="copy it again, or convert it in MindSpore: ms.ckpt_to_safetensors(folder)")  # fmt: skip
    if is_encrypted:
        fail(CheckpointFileError, f"{file} is encrypted", why="encrypted checkpoints are not read here",
             fix="load it in MindSpore with its dec_key, and save it without enc_key")  # fmt: skip
    return found


def _tensors(file: pathlib.Path, handle: BinaryIO) -> dict[str, FileTensor]:
    found: dict[str, SplitTensor] = {}
    last = ""
    for end in _values(handle):
        head, size = _before(handle, TENSOR, end)
        value = parse("Value", head)
        name = value.tag
        if not value.HasField("tag"):
            raise ValueError("a value has no name")
        if size is None:
            raise ValueError(f"`{name}` is no tensor, such as a map parameter, which is not read")
        is_last = handle.tell() + size == end
        head, size = _before(handle, CONTENT, end)
        begin = handle.tell()
        if not is_last or begin + (size or 0) != end:
            raise ValueError(f"the bytes of `{name}` do not end with its value, at byte {end:,}")
        one = _tensor(file, name, parse("Tensor", head), (begin, end))
        if one is None:
            continue
        if name == last:
            if (one.shape, one.dtype) != (found[name].shape, found[name].dtype):
                raise ValueError(f"the parts of `{name}` have different shapes or types")
            one = dataclasses.replace(found[name], parts=(*found[name].parts, *one.parts))
        elif name in found:
            raise ValueError(f"it holds `{name}` twice")
        found[name], last = one, name
    for name, tensor in found.items():
        held = sum(stop - start for start, stop in tensor.parts)
        if held != tensor.nbytes:
            raise ValueError(f"`{name}` needs {tensor.nbytes:,} bytes, and has {held:,}")
    return dict(found)


def _values(handle: BinaryIO) -> Iterator[int]:
    """Where each value ends; the file is at its first byte. protobuf would read all values at once, with their bytes."""
    size = os.fstat(handle.fileno()).st_size
    handle.seek(max(0, size - CHECKSUM_BYTES))
    at, end = 0, size - CHECKSUM_BYTES if handle.read(len(CHECKSUM)) == CHECKSUM else size
    if not size:
        raise ValueError("it is empty")
    while at < end:
        handle.seek(at)
        if _number(handle) != VALUE:
            raise ValueError(f"byte {at:,} begins no value of a checkpoint of MindSpore")
        length = _number(handle)
        at = handle.tell() + length
        if at > end:
            raise ValueError(f"a value should end at byte {at:,}, and the values end at {end:,}")
        yield at


def _before(handle: BinaryIO, key: int, end: int) -> tuple[bytes, int | None]:
    """Pass over the fields of a message up to one of bytes.

    Args:
      handle: the file, at the first field.
      key: the key of the field of bytes.
      end: where the message ends.

    Returns:
      The bytes of the fields before, and the size of that field's, at which the file is then; None without such a field.
    """
    at = begin = handle.tell()
    size = None
    while at < end and size is None:
        found, number = _number(handle), _number(handle)
        if found == key:
            size = number
        elif found & 7 in (0, 2):  # a number; a length and as many bytes
            at = handle.seek(number if found & 7 else 0, os.SEEK_CUR)
        else:
            raise ValueError(f"byte {at:,} begins no field of a checkpoint of MindSpore")
    here = handle.tell()
    if at > end or at - begin > MOST_BYTES:
        raise ValueError(f"a description has the bytes {begin:,} to {at:,}, and its value ends at {end:,}")
    handle.seek(begin)
    head = handle.read(at - begin)
    handle.seek(here)
    return head, size


def _number(handle: BinaryIO) -> int:
    """A key, a length or a number: seven bits a byte, the lowest first. https://protobuf.dev/programming-guides/encoding"""
    number = 0
    for shift in range(0, 70, 7):
        if not (byte := handle.read(1)):
            raise ValueError("it is truncated")
        number |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            break
    return number


def _tensor(file: pathlib.Path, name: str, tensor: Any, content: Span) -> SplitTensor | None:
    kind, shape = tensor.tensor_type, tuple(tensor.dims)
    if kind in NO_ARRAYS:
        return None
    if kind not in DTYPES:
        raise ValueError(f"`{name}` has the type {kind!r:.40}, which is unknown")
    if any(n < 0 for n in shape):
        raise ValueError(f"the tensor `{name}` cannot be read")
    is_scalar = shape == (0,) and content[0] < content[1]
    return SplitTensor(name, DTYPES[kind], () if is_scalar else shape, file, content[0], (content,))

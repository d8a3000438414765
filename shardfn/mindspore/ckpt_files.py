"""MindSpore's own checkpoint files, `.ckpt`: ProtoBuf messages one after the other, read without MindSpore.

The fields are those of MindSpore's published schema, `checkpoint.proto`. A file is a sequence of values, each with a name and a
tensor (shape, type, bytes). A large tensor is several values of one name that follow each other, each with the full shape and
a part of the bytes. A scalar has the shape (0,). A checksum may follow. Only descriptions are read when a file is opened.
"""

from __future__ import annotations

import dataclasses
import mmap
import pathlib
from typing import BinaryIO

import jax.numpy as jnp
import numpy as np

from shardfn.checkpoint.chunks import Box
from shardfn.checkpoint.safetensors_files import FileTensor, read_tensors
from shardfn.errors import CheckpointFileError, fail
from shardfn.layoutfile.protobuf import Span, fields, integers, text
from shardfn.regular_files import open_regular

SUFFIX = ".ckpt"
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
        with open_regular(file) as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            is_encrypted = int.from_bytes(data[:4], "little") in MAGIC
            found = {} if is_encrypted else _tensors(file, data)
    except (OSError, ValueError) as error:
        fail(CheckpointFileError, f"{file} cannot be read", why=str(error),
             fix="copy it again, or convert it in MindSpore: ms.ckpt_to_safetensors(folder)")  # fmt: skip
    if is_encrypted:
        fail(CheckpointFileError, f"{file} is encrypted", why="encrypted checkpoints are not read here",
             fix="load it in MindSpore with its dec_key, and save it without enc_key")  # fmt: skip
    return found


def _tensors(file: pathlib.Path, data: mmap.mmap) -> dict[str, FileTensor]:
    size = len(data)
    end = size - CHECKSUM_BYTES if data[-CHECKSUM_BYTES:].startswith(CHECKSUM) else size
    found: dict[str, SplitTensor] = {}
    last = ""
    for number, value in fields(data, (0, end)):
        if number != 1 or isinstance(value, int):
            raise ValueError("it is no checkpoint of MindSpore")
        parts = dict(fields(data, value))
        if 1 not in parts:
            raise ValueError("a value has no name")
        name = text(data, parts[1])
        if not isinstance(span := parts.get(2), tuple):
            raise ValueError(f"`{name}` is no tensor, such as a map parameter, which is not read")
        one = _tensor(file, data, name, span)
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


def _tensor(file: pathlib.Path, data: mmap.mmap, name: str, span: Span) -> SplitTensor | None:
    every = list(fields(data, span))
    by_number = dict(every)
    kind = text(data, by_number[2]) if 2 in by_number else ""
    if kind in NO_ARRAYS:
        return None
    if kind not in DTYPES:
        raise ValueError(f"`{name}` has the type {kind!r:.40}, which is unknown")
    shape = tuple(integers(data, (value for number, value in every if number == 1)))
    content = by_number.get(3, (span[1], span[1]))
    if isinstance(content, int) or any(n < 0 for n in shape):
        raise ValueError(f"the tensor `{name}` cannot be read")
    is_scalar = shape == (0,) and content[0] < content[1]
    return SplitTensor(name, DTYPES[kind], () if is_scalar else shape, file, content[0], (content,))

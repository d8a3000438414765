"""The safetensors file format, read and written in bounded memory.

A file holds eight bytes with the length of a JSON header, little-endian; the header, with dtype, shape and byte range of
each tensor; then the bytes of the tensors, row-major. https://huggingface.co/docs/safetensors. The package `safetensors`
holds complete tensors in memory; this module does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from shardfn.checkpoint.chunks import Box, box_shape, full_box
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, fail, raise_problems
from shardfn.layoutfile.files import atomic_file
from shardfn.regular_files import open_regular, read_bytes

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
STEP_BYTES = 8 << 20
"""Bytes of a file that are mapped at a time."""

DTYPE_OF_CODE = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "I16": "int16",
    "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "F64": "float64", "I64": "int64", "U64": "uint64", "C64": "complex64",
}  # fmt: skip
CODE_OF_DTYPE = {name: code for code, name in DTYPE_OF_CODE.items()}


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """The description of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class FileTensor(TensorHeader):
    """One tensor of a file; `start` is the offset of its bytes."""

    file: pathlib.Path
    start: int

    def read(self, box: Box) -> np.ndarray:
        """A box of the tensor.

        Raises:
          CheckpointFileError: a byte of a bool is neither 0 nor 1.
        """
        out = np.empty(box_shape(box), jnp.dtype(self.dtype))
        if not out.size:
            return out
        rows, *others = box or full_box((1,))  # a scalar is read as a row
        target = np.atleast_1d(out)
        # Map a few rows at a time: touched pages of the file count as memory until the map is closed.
        row = math.prod(self.shape[1:]) * out.dtype.itemsize
        step = max(1, STEP_BYTES // row)
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            with open_regular(self.file) as opened:
                mapped = np.memmap(opened, out.dtype, "r", self.start + first * row, (last - first, *self.shape[1:]))
            target[first - rows.start : last - rows.start] = mapped[(slice(None), *others)]
            del mapped
        if out.dtype == bool and out.size and out.view(np.uint8).max() > 1:
            fail(CheckpointFileError, f"{self.file} is damaged", where=f"`{self.name}`: bool{list(self.shape)}",
                 why=f"a bool is a byte of 0 or 1, and one here is {out.view(np.uint8).max()}",
                 fix="download or write it again")  # fmt: skip
        return out


def read_tensors(source: str | os.PathLike[str]) -> dict[str, FileTensor]:
    """The tensors of a file, of an index of files, or of a folder with either, by name.

    Raises:
      CheckpointFileError: files that are missing, truncated or not safetensors; all of them.
      CheckpointError: there are none, or two have one name.
    """
    source = pathlib.Path(source)
    files, indexed = _files(source)
    found: dict[str, FileTensor] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            header = _header(file)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            problems.append(Problem(f"{file} cannot be read", why=why, fix="download or write it again"))
            continue
        for tensor in header:
            if tensor.name in found:
                problems.append(Problem(f"two files hold the tensor `{tensor.name}`",
                                        where=f"{found[tensor.name].file}, {file}",
                                        why="a tensor is restored by its name",
                                        fix="import one of the files, or use an index"))  # fmt: skip
            found[tensor.name] = tensor
    for name, file in indexed.items():
        tensor = found.get(name)
        if not problems and (tensor is None or tensor.file.name != file):
            problems.append(Problem(f"{file} does not have `{name}`, though the index says so", where=str(source),
                                    fix="download the files and the index again"))  # fmt: skip
    raise_problems(problems, CheckpointFileError)
    return found


def _files(source: pathlib.Path) -> tuple[list[pathlib.Path], dict[str, str]]:
    """The files, and the file of each tensor according to the index."""
    if source.is_dir():
        indices = sorted(source.glob("*" + INDEX))
        if len(indices) == 1:
            source = indices[0]
        elif indices or not (files := sorted(source.glob("*" + SUFFIX))):
            fail(CheckpointError, f"{source} holds {'several indices' if indices else 'no safetensors files'}",
                 fix="name the file or the index: model.safetensors, model.safetensors.index.json")  # fmt: skip
        else:
            return files, {}
    if not source.name.endswith(".json"):
        return [source], {}
    try:
        rows = json.loads(read_bytes(source, MAX_HEADER_BYTES))["weight_map"]
        indexed = {str(name): str(file) for name, file in rows.items()}
        for file in indexed.values():
            if pathlib.PurePath(file).name != file or file in ("", ".", ".."):
                raise ValueError(f"{file!r:.60} is not the name of a file in the folder")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        fail(CheckpointFileError, f"{source} cannot be read", why=f"{type(error).__name__}: {error}",
             fix="an index is JSON with a weight_map of tensor names to file names")  # fmt: skip
    return [source.parent / file for file in dict.fromkeys(indexed.values())], indexed


def _header(file: pathlib.Path) -> list[FileTensor]:
    with open_regular(file) as handle:
        size = os.fstat(handle.fileno()).st_size
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"its header should have {length:,} bytes, and the file has {size:,}")
        rows = json.loads(handle.read(length))
    if not isinstance(rows, dict):
        raise ValueError("its header is not a JSON object of tensors")
    begin = 8 + length
    found = []
    for name, row in rows.items():
        if name == "__metadata__":
            continue
        if row["dtype"] not in DTYPE_OF_CODE:
            raise ValueError(f"`{name}` has the dtype {row['dtype']!r:.40}, which is unknown")
        shape, (first, last) = tuple(row["shape"]), row["data_offsets"]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, first, last)):
            raise ValueError(f"`{name}` has a shape or a range that is not a count")
        tensor = FileTensor(name, DTYPE_OF_CODE[row["dtype"]], shape, file, begin + first)
        if last - first != tensor.nbytes or begin + last > size:
            end = f"up to {begin + last:,}, and the file has {size:,}: it is truncated"
            raise ValueError(f"`{name}` needs {tensor.nbytes:,} bytes {end}")
        found.append(tensor)
    return found


def split_into_files(rows: Sequence[TensorHeader], most_bytes: float) -> list[list[TensorHeader]]:
    """The tensors of each file, in order, each file as full as `most_bytes` allows.

    >>> [len(part) for part in split_into_files([TensorHeader("a", "int8", (6,)), TensorHeader("b", "int8", (6,))], 8)]
    [1, 1]
    """
    parts: list[list[TensorHeader]] = [[]]
    for row in rows:
        if parts[-1] and sum(r.nbytes for r in parts[-1]) + row.nbytes > most_bytes:
            parts.append([])
        parts[-1].append(row)
    return parts


@contextlib.contextmanager
def write_tensors(target: pathlib.Path, rows: Sequence[TensorHeader]) -> Iterator[BinaryIO]:
    """A file with its header, open for the bytes of the tensors in order; it gets its name when complete."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for row in rows:
        end = at + row.nbytes
        header[row.name] = {"dtype": CODE_OF_DTYPE[row.dtype], "shape": list(row.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the bytes of the first tensor
    with atomic_file(target) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        yield file
        if file.tell() != 8 + len(text) + at:
            raise AssertionError(f"{target.name} has {file.tell()} bytes, not {8 + len(text) + at}")


def contiguous_boxes(shape: Sequence[int], most: int, row_multiple: int = 1) -> Iterator[Box]:
    """Boxes of a row-major array that follow each other in memory, of at most `most` elements where possible.

    A box has a multiple of `row_multiple` rows if it has that many, so that no chunk is read twice.

    >>> [box[0] for box in contiguous_boxes((5, 4), 8)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    if not shape:
        yield ()
    elif (row := math.prod(shape[1:])) <= most or len(shape) == 1:
        step = max(1, most // max(row, 1))
        step = step // row_multiple * row_multiple or step
        for start in range(0, shape[0], step):
            yield (slice(start, min(start + step, shape[0])), *full_box(shape[1:]))
    else:
        for i in range(shape[0]):
            yield from ((slice(i, i + 1), *rest) for rest in contiguous_boxes(shape[1:], most))

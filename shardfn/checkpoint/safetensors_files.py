"""Files in the safetensors format, by the package `safetensors`, in bounded memory. https://huggingface.co/docs/safetensors

The package checks a file's header and writes a file. The bytes of a tensor are mapped here: the package gives NumPy no arrays
of 8-bit floats.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType

import jax.numpy as jnp
import numpy as np

from shardfn.checkpoint.chunks import Box, box_shape, boxes, full_box
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, fail, raise_problems
from shardfn.files import atomic_path, check_regular, open_regular, read_bytes
from shardfn.runtime.extras import need

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000  # the package's limit of a header
STEP_BYTES = 8 << 20
"""Bytes of a file that are mapped at a time: touched pages of the file count as memory until the map is closed."""

DTYPE_OF_CODE = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16",
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
          CheckpointFileError: a byte of a bool is neither 0 nor 1; the file has been cut since it was opened.
        """
        out = np.empty(box_shape(box), jnp.dtype(self.dtype))
        if not out.size:
            return out
        rows, *others = box or full_box((1,))  # a scalar is read as a row
        target = np.atleast_1d(out)
        row_bytes = math.prod(self.shape[1:]) * out.dtype.itemsize
        step = max(1, STEP_BYTES // row_bytes)
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            start = self.start + first * row_bytes
            try:
                with open_regular(self.file) as opened:
                    mapped = np.memmap(opened, out.dtype, "r", start, (last - first, *self.shape[1:]))
            except (OSError, ValueError) as error:
                fail(CheckpointFileError, f"{self.file} cannot be read", where=f"`{self.name}`", why=str(error),
                     fix="download or write it again")  # fmt: skip
            target[first - rows.start : last - rows.start] = mapped[(slice(None), *others)]
        if out.dtype == bool and out.view(np.uint8).max() > 1:
            fail(CheckpointFileError, f"{self.file} is damaged", where=f"`{self.name}`: bool{list(self.shape)}",
                 why=f"a bool is a byte of 0 or 1, and one here is {out.view(np.uint8).max()}",
                 fix="download or write it again")  # fmt: skip
        return out


def _package() -> ModuleType:
    return need("safetensors", "checkpoint")


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
        except (OSError, ValueError, _package().SafetensorError) as error:
            problems.append(Problem(f"{file} cannot be read", why=str(error), fix="download or write it again"))
            continue
        for tensor in header:
            if indexed.get(tensor.name, file.name) != file.name:  # the index says which of two files counts
                continue
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
        rows = json.loads(read_bytes(source, MAX_INDEX_BYTES))["weight_map"]
        indexed = {str(name): str(file) for name, file in rows.items()}
        for file in indexed.values():
            if pathlib.PurePath(file).name != file or file in ("", ".", ".."):
                raise ValueError(f"{file!r:.60} is not the name of a file in the folder")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        fail(CheckpointFileError, f"{source} cannot be read", why=f"{type(error).__name__}: {error}",
             fix="an index is JSON with a weight_map of tensor names to file names")  # fmt: skip
    return [source.parent / file for file in dict.fromkeys(indexed.values())], indexed


def export_files(stem: pathlib.Path) -> set[pathlib.Path]:
    """The files of an earlier export: `model.safetensors`, or the index of this name and the numbered files that it lists."""
    base = stem.name.removesuffix(SUFFIX)
    index = stem.with_name(base + INDEX)
    try:
        named = set(map(str, json.loads(read_bytes(index, MAX_INDEX_BYTES))["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        named = set()
    numbered = re.compile(re.escape(base) + r"-\d+-of-\d+" + re.escape(SUFFIX))
    found = {stem, index, *(stem.with_name(name) for name in named if numbered.fullmatch(name))}
    return {file for file in found if file.is_file()}


def _header(file: pathlib.Path) -> list[FileTensor]:
    check_regular(file)
    with _package().safe_open(file, "numpy") as opened:
        rows = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
        rows = [(name, row.get_dtype(), tuple(row.get_shape())) for name, row in rows]
    for name, code, _ in rows:
        if code not in DTYPE_OF_CODE:
            raise ValueError(f"`{name}` has the dtype {code}, which NumPy and ml_dtypes do not have")
    headers = [TensorHeader(name, DTYPE_OF_CODE[code], shape) for name, code, shape in rows]
    # The package accepts no gaps, no overlaps and nothing after the last tensor.
    at = file.stat().st_size - sum(header.nbytes for header in headers)
    found = []
    for header in headers:
        found.append(FileTensor(header.name, header.dtype, header.shape, file, at))
        at += header.nbytes
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


def write_tensors(
    target: pathlib.Path, rows: Sequence[TensorHeader], pieces: Callable[[TensorHeader], Iterable[np.ndarray]]
) -> None:
    """Write a file, which gets its name when it is complete and on disk.

    The package writes a file from arrays. They are zeros here, which take no memory; then the pieces replace them.

    Args:
      target: the file.
      rows: its tensors.
      pieces: the values of a tensor, as arrays that follow each other.

    Raises:
      OSError: the disk is full, or the file cannot be written.
    """
    zeros = np.zeros(max((row.nbytes for row in rows), default=0), np.uint8)
    arrays = {row.name: zeros[: row.nbytes].view(jnp.dtype(row.dtype)).reshape(row.shape) for row in rows}
    try:
        with atomic_path(target) as part:
            part.touch()
            mode = part.stat().st_mode
            need("safetensors.numpy", "checkpoint").save_file(arrays, part, {"format": "pt"})
            part.chmod(mode)  # the package's own file is for its owner alone
            with os.fdopen(os.open(part, os.O_WRONLY), "wb") as file:
                for tensor in _header(part):
                    file.seek(tensor.start)
                    for piece in pieces(tensor):
                        file.write(piece.tobytes())
                    if file.tell() != tensor.start + tensor.nbytes:
                        raise AssertionError(
                            f"`{tensor.name}` has {file.tell() - tensor.start} bytes, not {tensor.nbytes}"
                        )
    except _package().SafetensorError as error:
        raise OSError(str(error)) from None


def contiguous_boxes(shape: Sequence[int], most: int, row_multiple: int = 1) -> Iterator[Box]:
    """Boxes of a row-major array that follow each other in memory, of at most `most` elements where possible.

    A box has a multiple of `row_multiple` rows if it has that many, so that no chunk is read twice.

    >>> [box[0] for box in contiguous_boxes((5, 4), 8)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    last = max(len(shape) - 1, 0)
    dim = next((d for d in range(last) if math.prod(shape[d + 1 :]) <= most), last)
    step = max(1, most // max(math.prod(shape[dim + 1 :]), 1))
    if not dim:
        step = step // row_multiple * row_multiple or step
    return boxes(shape, (*(1,) * dim, step, *shape[dim + 1 :]))

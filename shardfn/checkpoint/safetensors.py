"""Export checkpoints to safetensors and import them, in bounded memory."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from shardfn import layoutfile
from shardfn.checkpoint import arrays, offline, reader
from shardfn.checkpoint.chunks import Chunks
from shardfn.checkpoint.contents import StoredArray
from shardfn.checkpoint.safetensors_files import (
    CODE_OF_DTYPE,
    INDEX,
    SUFFIX,
    TensorHeader,
    contiguous_boxes,
    export_files,
    read_tensors,
    split_into_files,
    write_tensors,
)
from shardfn.checkpoint.step_folders import StrPath, absolute_path, open_step, whole_number
from shardfn.errors import CheckpointError, Problem, raise_problems
from shardfn.files import atomic_file

FILE_BYTES = 5 << 30


def export_safetensors(
    path: StrPath,
    target: StrPath,
    *,
    step: int | None = None,
    only: reader.Globs = None,
    name_map: reader.Names = None,
    dtype: Any = None,
    separator: str = ".",
    file_bytes: int | str = FILE_BYTES,
    memory: int | str = offline.MEMORY,
) -> tuple[pathlib.Path, ...]:
    """Write a checkpoint as safetensors: one file, or several with a `.safetensors.index.json`.

    An export replaces an earlier one of the same name, with all of its files.

    Args:
      path: the folder of the checkpoint.
      target: the file, such as `model.safetensors`, or a folder for `model.safetensors`.
      step: which step; the last if None.
      only: as in `restore`.
      name_map: as in `restore`.
      dtype: as in `restore`.
      separator: replaces `/` in the names of tensors.
      file_bytes: most bytes of a file, as a number or as "5GB"; more are split into several files.
      memory: most bytes in memory at once, as a number or as "256MiB". Larger chunks, of a checkpoint that Orbax wrote by
        itself, take what they need: all that some rows of an array are in, where the rows are written at once.

    Returns:
      The files that were written.

    Raises:
      CheckpointError: dtypes that safetensors does not have, two tensors with one name, no such step.
      CheckpointFileError: damaged files, by name; a full disk.
      ExtraError: the package safetensors is not installed.

    >>> import os, tempfile, jax.numpy as jnp
    >>> from shardfn import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = checkpoint.save(os.path.join(folder, "run"), {"w": jnp.ones((8, 4))})
    ...     files = checkpoint.export_safetensors(os.path.join(folder, "run"), os.path.join(folder, "model.safetensors"))
    ...     [file.name for file in files]
    ['model.safetensors']
    """
    bound = offline.memory_bytes(memory)
    most = offline.memory_bytes(file_bytes, "file_bytes", "smaller files than a MiB would be too many")
    folder, _, contents = open_step(path, step)
    names: dict[str, reader.Renamed] = {}
    problems = []
    for row in reader.choose_arrays(contents, None, only, name_map, dtype):
        name = row.new.path.replace("/", separator)
        if row.new.dtype not in CODE_OF_DTYPE:
            problems.append(Problem(f"safetensors has no dtype {row.new.dtype}", where=row.stored.text,
                                    fix="cast it with dtype=, or exclude it with only="))  # fmt: skip
        if name in names:
            problems.append(Problem(f"two tensors would have the name `{name}`",
                                    where=f"{names[name].new.path}, {row.new.path}",
                                    fix="choose another separator, or rename one with name_map"))  # fmt: skip
        names[name] = row
    raise_problems(problems, CheckpointError)
    parts = split_into_files([TensorHeader(name, row.new.dtype, row.new.shape) for name, row in names.items()], most)
    stem = absolute_path(target)
    if not stem.name.endswith(SUFFIX):
        stem = stem / f"model{SUFFIX}"
    base = stem.name.removesuffix(SUFFIX)
    files = [stem] if len(parts) == 1 else [
        stem.with_name(f"{base}-{i:05}-of-{len(parts):05}{SUFFIX}") for i in range(1, len(parts) + 1)]  # fmt: skip
    earlier = export_files(stem)
    with arrays.write_errors(stem.parent):
        stem.parent.mkdir(parents=True, exist_ok=True)
        for file, rows in zip(files, parts, strict=True):
            write_tensors(file, rows, lambda tensor: _pieces(folder, names[tensor.name], bound))
        if len(parts) > 1:
            weights = {row.name: file.name for file, rows in zip(files, parts, strict=True) for row in rows}
            total = sum(row.nbytes for rows in parts for row in rows)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=1)
            files.append(stem.with_name(base + INDEX))
            with atomic_file(files[-1]) as file:
                file.write(f"{text}\n".encode())
        for file in earlier - {*files}:
            file.unlink(missing_ok=True)
    return tuple(files)


def _pieces(folder: pathlib.Path, row: reader.Renamed, bound: int) -> Iterator[np.ndarray]:
    old = row.stored
    if 0 not in old.shape:
        most = int(bound // offline.SHARE / max(old.itemsize, row.new.numpy_dtype.itemsize))
        boxes = list(contiguous_boxes(old.shape, most, old.chunks.chunk[0] if old.shape else 1))
        (read,) = offline.box_readers(folder, [row], [boxes])
        yield from map(read, boxes)


def import_safetensors(
    source: StrPath,
    path: StrPath,
    layout: Any = None,
    *,
    devices: int | None = None,
    step: int = 0,
    name_map: reader.Names = None,
    separator: str = ".",
    memory: int | str = offline.MEMORY,
) -> offline.CopyResult:
    """Make a checkpoint from safetensors: a file, an index of files, or a folder with either.

    Args:
      source: the file, the index or the folder.
      path: the folder of the checkpoint.
      layout: the shardings of the checkpoint: a plan, a layout file or the name of a recipe; every array unsharded if None.
      devices: the device count, where the layout leaves the size of an axis open.
      step: the number of the step.
      name_map: new names by those in the files, of tensors or of their prefixes.
      separator: becomes `/` in paths.
      memory: most bytes in memory at once, as a number or as "256MiB".

    Returns:
      What was written.

    Raises:
      CheckpointError: the step exists already, or is no int of 0 or more; two tensors with one name.
      CheckpointFileError: files that are missing, truncated, or not safetensors; a full disk.
      ExtraError: the package safetensors is not installed.
      ShardError: the layout does not fit the arrays.

    >>> import os, tempfile, jax.numpy as jnp
    >>> from shardfn import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run, file, again = (os.path.join(folder, name) for name in ("run", "model.safetensors", "again"))
    ...     _ = checkpoint.save(run, {"layer": {"w": jnp.ones((8, 4))}})
    ...     _ = checkpoint.export_safetensors(run, file)
    ...     _ = checkpoint.import_safetensors(file, again)
    ...     checkpoint.restore(again)["layer"]["w"].shape
    (8, 4)
    """
    bound = offline.memory_bytes(memory)
    separator, step = separator or "/", whole_number("step", step, 0, f"import_safetensors({str(source)!r}, …")
    tensors = list(read_tensors(source).values())
    entries = []
    for tensor in tensors:
        key, chunks = tensor.name.replace(separator, "/"), Chunks(tensor.shape, tensor.shape)
        keys = tuple(("key", part) for part in key.split("/"))
        entries.append(StoredArray(key, tensor.shape, tensor.dtype, keys, (1,) * len(tensor.shape), chunks))
    rows = reader.rename_arrays(entries, {k.replace(separator, "/"): v for k, v in (name_map or {}).items()})
    raise_problems(reader.nested_arrays(rows), CheckpointError)
    layout = None if layout is None else layoutfile.read_layout(layout)
    return offline.write_copy(
        path, step, [row.new for row in rows], lambda _: [tensor.read for tensor in tensors], layout, devices, bound
    )

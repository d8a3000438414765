"""Export checkpoints to safetensors and import them, in bounded memory."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from shardfn.checkpoint import arrays, offline, reader
from shardfn.checkpoint.chunks import Chunks
from shardfn.checkpoint.contents import StoredArray
from shardfn.checkpoint.safetensors_files import (
    CODE_OF_DTYPE,
    INDEX,
    SUFFIX,
    TensorHeader,
    contiguous_boxes,
    read_tensors,
    split_into_files,
    write_tensors,
)
from shardfn.checkpoint.step_folders import absolute_path, open_step
from shardfn.errors import CheckpointError, CheckpointFileError, Problem
from shardfn.runtime.extras import need

FILE_BYTES = 5 << 30


def export_safetensors(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    only: reader.Globs = None,
    name_map: Mapping[str, str] | None = None,
    dtype: Any = None,
    separator: str = ".",
    file_bytes: int | str = FILE_BYTES,
    memory: int | str = offline.MEMORY,
) -> tuple[pathlib.Path, ...]:
    """Write a checkpoint as safetensors: one file, or several with a `.safetensors.index.json`.

    Args:
      path: the folder of the checkpoint.
      target: the file, such as `model.safetensors`, or a folder for `model.safetensors`.
      step: which step; the last if None.
      only: as in `restore`.
      name_map: as in `restore`.
      dtype: as in `restore`.
      separator: replaces `/` in the names of tensors.
      file_bytes: most bytes of a file, as a number or as "5GB"; more are split into several files.
      memory: most bytes in memory at once, as a number or as "256MiB".

    Returns:
      The files that were written.

    Raises:
      CheckpointError: dtypes that safetensors does not have, two tensors with one name, no such step.
      CheckpointFileError: damaged files, by name; a full disk.
    """
    need("tensorstore", "checkpoint")
    bound, most = offline.memory_bytes(memory), offline.memory_bytes(file_bytes)
    folder, _, contents = open_step(path, step)
    one = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    chosen = reader.choose_arrays(contents, one, None, only, name_map, dtype)
    names: dict[str, reader.RestoredArray] = {}
    problems = []
    for row in chosen:
        name = row.path.replace("/", separator)
        if str(row.dtype) not in CODE_OF_DTYPE:
            problems.append(Problem(f"safetensors has no dtype {row.dtype}", where=row.entry.text,
                                    fix="cast it with dtype=, or exclude it with only="))  # fmt: skip
        if name in names:
            problems.append(Problem(f"two tensors would have the name `{name}`", where=f"{names[name].path}, {row.path}",
                                    fix="choose another separator, or rename one with name_map"))  # fmt: skip
        names[name] = row
    if problems:
        raise CheckpointError(problems)
    parts = split_into_files([TensorHeader(name, str(row.dtype), row.entry.shape) for name, row in names.items()], most)
    stem = absolute_path(target)
    if not stem.name.endswith(SUFFIX):
        stem = stem / f"model{SUFFIX}"
    base = stem.name.removesuffix(SUFFIX)
    files = [stem] if len(parts) == 1 else [
        stem.with_name(f"{base}-{i:05}-of-{len(parts):05}{SUFFIX}") for i in range(1, len(parts) + 1)]  # fmt: skip
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for file, rows in zip(files, parts, strict=True):
            with write_tensors(file, rows, {"format": "pt"}) as out:
                for planned in rows:
                    _write(out, folder, names[planned.name], bound)
        if len(parts) > 1:
            files.append(stem.with_name(base + INDEX))
            weights = {row.name: file.name for file, rows in zip(files, parts, strict=False) for row in rows}
            total = sum(row.nbytes for rows in parts for row in rows)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=1)
            draft = files[-1].with_name(f".{files[-1].name}.part")
            draft.write_text(text + "\n", encoding="utf-8")
            os.replace(draft, files[-1])
    except OSError as error:
        if not isinstance(error, CheckpointFileError):
            arrays.raise_write_error(error, stem.parent)
        raise
    return tuple(files)


def _write(out: Any, folder: pathlib.Path, row: reader.RestoredArray, bound: int) -> None:
    entry = row.entry
    if 0 in entry.shape:
        return
    try:
        store = arrays.open_array(folder, entry).result()
        if str(row.dtype) != entry.dtype:
            store = need("tensorstore", "checkpoint").cast(store, str(row.dtype))
        most = int(bound // offline.SHARE / max(entry.itemsize, row.dtype.itemsize))
        for box in contiguous_boxes(entry.shape, most, entry.chunks.chunk[0] if entry.shape else 1):
            out.write(store[box].read().result().tobytes())
    except ValueError as error:
        raise CheckpointFileError(arrays.damage(folder, entry, error)) from None


def import_safetensors(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    layout: Any = None,
    *,
    devices: int | None = None,
    step: int = 0,
    name_map: Mapping[str, str] | None = None,
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
      CheckpointError: the step exists already; two tensors with one name.
      CheckpointFileError: files that are missing, truncated, or not safetensors; a full disk.
      ShardError: the layout does not fit the arrays.
    """
    need("tensorstore", "checkpoint")
    bound = offline.memory_bytes(memory)
    found = read_tensors(source)
    entries = []
    for name, tensor in found.items():
        key = name.replace(separator, "/") if separator else name
        keys = tuple(("key", part) for part in key.split("/"))
        chunks = Chunks(tensor.shape, tensor.shape)
        entries.append(StoredArray(key, tensor.shape, tensor.dtype, keys, (1,) * len(tensor.shape), chunks))
    by_path = {entry.path: found[name] for entry, name in zip(entries, found, strict=True)}
    renamed = reader.rename_arrays(entries, {k.replace(separator, "/"): v for k, v in (name_map or {}).items()})
    if problems := reader.nested_arrays(renamed):
        raise CheckpointError(problems)
    rows = [(path_, entry, keys) for path_, (entry, keys) in renamed.items()]

    if layout is not None:
        layout = offline.as_layout_file(layout)
        count = devices if devices is not None else offline.device_count(layout)
    else:
        count = 1
    described = offline.copy_contents(
        [dataclasses.replace(entry, path=p, keys=keys) for p, entry, keys in rows], layout, count, bound
    )
    with offline.new_step(path, step) as (out, commit):
        for (_, old, _), entry in zip(rows, described.entries, strict=True):
            tensor = by_path[old.path]
            offline.copy_array(
                out, entry, None if 0 in entry.shape else lambda box, t=tensor: arrays.ReadyValue(t.read(box)), bound
            )
        commit(described)
    return offline.CopyResult(absolute_path(path), step, len(described.entries), described.nbytes, count)

"""Reads the description of the arrays in a folder that Orbax wrote: Orbax's files of metadata, and the arrays' own."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from jax import tree_util

from shardfn.checkpoint import arrays
from shardfn.checkpoint.chunks import Chunks
from shardfn.checkpoint.contents import (
    BARE,
    EMPTY,
    HOST,
    KEY,
    NUMBER,
    TEXT,
    Contents,
    StoredArray,
    StoredMesh,
    mesh_order,
)
from shardfn.errors import CheckpointFileError, Problem, ShardError, fail, raise_problems
from shardfn.files import atomic_file, read_bytes
from shardfn.ir.model import Spec

METADATA = "_METADATA"
"""Orbax's file with the tree of a checkpoint. A folder that has it holds arrays."""
SHARDINGS = "_sharding"
"""Orbax's file of shardings: a JSON text for each array, by its name in base64."""
EXTENSIONS = "array_metadatas"
"""Orbax's folder for what Zarr has no place for, such as the implementation of a PRNG key."""
MANIFEST = "manifest.ocdbt"
"""The file that begins an OCDBT database."""
MAX_BYTES = 1 << 30
"""The largest of these files that is read."""

SUMS = "SHA256SUMS"
"""The checksums of the files that describe the arrays, as `sha256sum -c` reads them. Only `save` writes it."""

KINDS = {"np.ndarray": HOST, "scalar": NUMBER, "string": TEXT}
SEQUENCE = 1
"""Orbax's number for keys of lists and tuples."""


def read_contents(folder: pathlib.Path, is_ours: bool = False) -> Contents:
    """The description of the arrays in a folder, which `save` wrote if `is_ours`.

    Raises:
      CheckpointFileError: it is missing or damaged, or an array of it cannot be opened.
    """
    file = folder / METADATA
    try:
        arrays.check_files(folder)
        _check_sums(folder, is_ours)
        rows = _tree(json.loads(read_bytes(file, MAX_BYTES)), (folder / MANIFEST).exists())
        shardings, implementations = _shardings(folder), _key_implementations(folder)
    except (FileNotFoundError, NotADirectoryError):
        _damaged(file, "every complete step has one", "is missing")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ShardError):
            raise
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        _damaged(file, why)
    texts = tuple(row for row in rows if row.kind == TEXT)
    empty = tuple(row for row in rows if row.kind.startswith(EMPTY))
    rows = [row for row in rows if row.kind != TEXT and not row.kind.startswith(EMPTY)]
    entries, problems = [], []
    for entry, opening in zip(rows, arrays.open_arrays(folder, rows), strict=True):
        try:
            entries.append(_described(entry, opening.result(), shardings, implementations))
        except (OSError, ValueError, TypeError, KeyError) as error:
            problems.append(arrays.damage(folder, entry, error))
    raise_problems(problems, CheckpointFileError)
    devices = max((entry.mesh.devices for entry in entries), default=1)
    return Contents(tuple(entries), devices, max(1, len(list(folder.glob("ocdbt.process_*")))), texts, empty)


def _sums(folder: pathlib.Path) -> dict[str, str]:
    """The SHA-256 of each file that describes arrays; the values themselves have checksums of their own."""
    names = [METADATA, SHARDINGS, MANIFEST, f"{EXTENSIONS}/process_*", f"ocdbt.process_*/{MANIFEST}"]
    files = sorted(file for name in names for file in folder.glob(name) if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(read_bytes(file, MAX_BYTES)).hexdigest() for file in files}


def write_sums(folder: pathlib.Path) -> None:
    """Write `SUMS`. Its last line, a comment for `sha256sum`, is the checksum of the lines before it."""
    lines = "".join(f"{total}  {name}\n" for name, total in _sums(folder).items()).encode()
    with atomic_file(folder / SUMS) as file:
        file.write(lines + _own_sum(lines))


def _own_sum(lines: bytes) -> bytes:
    return f"# {hashlib.sha256(lines).hexdigest()} of these lines\n".encode()


def _check_sums(folder: pathlib.Path, is_ours: bool) -> None:
    """Compare the files with `SUMS`, which is there if `save` wrote them.

    Raises:
      CheckpointFileError: `SUMS` is damaged, or missing; or files that are missing or changed, all of them, by name.
    """
    try:
        data = read_bytes(folder / SUMS, MAX_BYTES)
    except FileNotFoundError:
        if is_ours and (folder / METADATA).is_file():
            _damaged(
                folder / SUMS,
                "`save` writes it: it has the checksums of the files that describe the arrays",
                "is missing",
            )
        return
    body, mark, rest = data.partition(b"# ")
    rows = [re.fullmatch(r"([0-9a-f]{64})  (.+)", line) for line in body.decode(errors="replace").splitlines()]
    told, found = {row[2]: row[1] for row in rows if row}, _sums(folder)
    if not all(rows) or (mark and mark + rest != _own_sum(body)) or found.keys() - told.keys():
        _damaged(folder / SUMS, "it is not as `save` wrote it, so it says nothing of the other files", "is damaged")
    problems = []
    for name, total in told.items():
        if found.get(name) != total:
            what = "is not the file that was saved" if name in found else "is missing"
            problems.append(Problem(f"{folder / name} {what}", where=str(folder / SUMS),
                                    why="its SHA-256 does not stand here",
                                    fix="restore another step: checkpoint.steps(path) lists them"))  # fmt: skip
    raise_problems(problems, CheckpointFileError)


def _damaged(file: Any, why: str, what: str = "cannot be read") -> NoReturn:
    fix = "restore another step: checkpoint.steps(path) lists them"
    fail(CheckpointFileError, f"{file} {what}", why=why, fix=fix)


def _tree(data: Mapping[str, Any], is_ocdbt: bool) -> list[StoredArray]:
    """The places and kinds of the arrays and empty nodes of the tree, without what each array says itself."""
    driver = "zarr3" if data.get("use_zarr3") else "zarr"
    found: list[StoredArray] = []
    for row in data["tree_metadata"].values():
        value = row["value_metadata"]
        keys = tuple(("item" if key["key_type"] == SEQUENCE else "key", str(key["key"])) for key in row["key_metadata"])
        path, told = "/".join(name for _, name in keys) or BARE, value["value_type"]
        kind = f"{EMPTY}{told}" if value.get("skip_deserialize") else KINDS.get(told, "array")
        found.append(
            StoredArray(path, (), "float32", keys, (), Chunks((), ()), kind=kind, driver=driver, is_ocdbt=is_ocdbt)
        )
    return found


def _described(
    entry: StoredArray, store: Any, shardings: Mapping[str, Any], implementations: Mapping[str, str]
) -> StoredArray:  # fmt: skip
    """An array with what its TensorStore, the sharding file and the extensions say."""
    shape, layout = tuple(store.shape), store.chunk_layout
    file = tuple(layout.write_chunk.shape or shape)
    kind = KEY + implementations[entry.name] if entry.name in implementations else entry.kind
    mesh, spec = _sharding(shardings.get(entry.name), len(shape))
    sizes = dict(mesh.axes)
    if unknown := {axis for dim in spec for axis in dim} - sizes.keys():
        raise ValueError(f"{SHARDINGS} shards it over the axes {', '.join(sorted(unknown))}, which its mesh has not")
    strategy = tuple(math.prod(sizes[axis] for axis in dim) for dim in spec)
    chunks = Chunks(file, tuple(layout.read_chunk.shape or file))
    dtype = store.dtype.name
    return dataclasses.replace(
        entry, shape=shape, dtype=dtype, strategy=strategy, chunks=chunks, spec=spec, mesh=mesh, kind=kind
    )


def _shardings(folder: pathlib.Path) -> dict[str, Any]:
    """The recorded shardings by the arrays' names; empty where there are none."""
    try:
        rows = json.loads(read_bytes(folder / SHARDINGS, MAX_BYTES))
    except FileNotFoundError:
        return {}
    return {base64.urlsafe_b64decode(name).decode(): json.loads(text) for name, text in rows.items() if text}


def _key_implementations(folder: pathlib.Path) -> dict[str, str]:
    """The implementations of PRNG keys by the arrays' names."""
    found = {}
    for file in sorted((folder / EXTENSIONS).glob("process_*")):
        for row in json.loads(read_bytes(file, MAX_BYTES))["array_metadatas"]:
            held = row["array_metadata"]
            if impl := (held.get("ext_metadata") or {}).get("random_key_impl"):
                found[held["param_name"]] = str(impl)
    return found


def _sharding(row: Mapping[str, Any] | None, rank: int) -> tuple[StoredMesh, Spec]:
    """The mesh and the axes of each dimension, from a text of `SHARDINGS`."""
    unsharded: Spec = ((),) * rank
    if row is None or row.get("sharding_type") != "NamedSharding":
        return StoredMesh(()), unsharded
    axes = tuple((str(name), int(size)) for name, size in zip(row["axis_names"], row["shape"], strict=True))
    if math.prod(size for _, size in axes) == 1:
        return StoredMesh(()), unsharded
    given = [() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in row["partition_spec"]]
    spec = (*(tuple(map(str, dim)) for dim in given[:rank]), *(((),) * (rank - len(given))))
    nested = (row.get("device_mesh") or {}).get("mesh", [])
    devices = tree_util.tree_leaves(nested, is_leaf=lambda x: isinstance(x, dict))
    return StoredMesh(axes, mesh_order([device["id"] for device in devices])), spec

"""`restore`: read a step under any sharding, each device only what it needs; `reads`: what that would read."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util
from jax.sharding import Sharding

from shardfn.checkpoint import arrays, fingerprints, state_tree, targets
from shardfn.checkpoint.contents import KEY, Contents, StoredArray
from shardfn.checkpoint.step_folders import open_step
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, fail
from shardfn.frontend.paths import join, met, normal
from shardfn.runtime.extras import need

Globs = str | Sequence[str] | None


def restore(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    like: Any = None,
    step: int | None = None,
    only: Globs = None,
    name_map: Mapping[str, str] | None = None,
    dtype: Any = None,
) -> Any:
    """Read a checkpoint under any sharding, on any number of devices and processes; each device reads what it holds.

    Args:
      path: the folder that `save` was called with.
      target: where the arrays go: a plan; a layout file or the name of a recipe; a `Mesh`, for the stored axes by name; a
        device ("cpu", `jax.devices()[0]`); a list of devices, replicated; a sharding, or a tree of shardings by path.
        None: the shardings of the arrays of `like`, else the stored ones.
      like: a pytree of arrays or shapes that gives the structure, shapes and dtypes of the result. Without it the result
        is dicts and lists: a module or a named tuple becomes a dict of its fields.
      step: which step; the last if None.
      only: globs of paths to restore, as stored or as renamed. Other leaves of `like` are returned unchanged; other
        arrays of the checkpoint are not read.
      name_map: new paths by stored ones, of arrays or of containers: {"encoder": "model/encoder"}.
      dtype: the dtype that floating-point arrays are cast to while they are read, such as `jnp.bfloat16`; or a dict of
        dtypes by glob.

    Returns:
      The pytree. Arrays of 64 bits are NumPy arrays while `jax_enable_x64` is off.

    Raises:
      CheckpointError: there is no such step; leaves that are missing, surplus or of other shapes, all together.
      CheckpointFileError: files that are missing, truncated or changed, by name. Nothing is returned then.
      ShardError: the target does not fit the arrays or the devices.

    >>> import tempfile, jax.numpy as jnp
    >>> from shardfn.checkpoint import save
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = save(path, {"w": jnp.arange(8.0), "b": jnp.zeros(2)})
    ...     restore(path, jax.devices()[0], only="w", dtype=jnp.bfloat16)
    {'w': Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=bfloat16)}
    """
    need("tensorstore", "checkpoint")
    folder, _, contents = open_step(path, step)
    chosen = choose_arrays(contents, target, like, only, name_map, dtype)
    values = _values(folder, contents, [row.wanted for row in chosen])
    found = {
        row.path: state_tree.restore_leaf(row.entry.kind, value) for row, value in zip(chosen, values, strict=True)
    }
    if like is None:
        return state_tree.nested({row.keys: found[row.path] for row in chosen})
    flat, tree = tree_util.tree_flatten_with_path(like)
    return tree_util.tree_unflatten(tree, [found.get(join("", key) or state_tree.BARE, old) for key, old in flat])


def _values(folder: pathlib.Path, contents: Contents, wanted: Sequence[arrays.ArrayRead]) -> list[Any]:
    """The arrays, if every file that was read is intact and belongs to the step."""
    values, problems = [], []
    try:
        values = arrays.read_arrays(folder, wanted)
    except CheckpointFileError as error:
        problems = list(error.problems)
    names = {name for want in wanted for name in fingerprints.files_of_boxes(want.entry, want.boxes)}
    problems += fingerprints.changed_files(folder, contents, [problem.what for problem in problems], names)
    if problems:
        raise CheckpointFileError(problems)
    return values


@dataclasses.dataclass(frozen=True)
class RestoreReads:
    """Bytes that a restore reads; print it for a table.

    Attributes:
      needed: for each device, bytes of the arrays that it holds afterwards, uncompressed.
      read: for each device, bytes of the chunks that it reads for them, uncompressed.
      total: bytes of the checkpoint.
    """

    needed: Mapping[Any, int]
    read: Mapping[Any, int]
    total: int

    def __str__(self) -> str:
        rows = [f"{'device':<24}{'needed B':>16}{'read B':>16}{'more':>8}"]
        for device, needed in self.needed.items():
            more = self.read[device] / needed - 1 if needed else 0.0
            rows.append(f"{device!s:<24}{needed:>16,}{self.read[device]:>16,}{more:>8.1%}")
        return "\n".join([*rows, f"the checkpoint holds {self.total:,} B"])


def reads(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    like: Any = None,
    step: int | None = None,
    only: Globs = None,
    name_map: Mapping[str, str] | None = None,
) -> RestoreReads:
    """The bytes that a restore would read for each device of this process, from the description alone.

    Args:
      path: as in `restore`.
      target: as in `restore`.
      like: as in `restore`.
      step: as in `restore`.
      only: as in `restore`.
      name_map: as in `restore`.

    Returns:
      The bytes by device.

    Raises:
      ShardError: as `restore`.
    """
    _, _, contents = open_step(path, step)
    needed: dict[Any, int] = {}
    read: dict[Any, int] = {}
    for row in choose_arrays(contents, target, like, only, name_map, None):
        for total, part in zip((needed, read), arrays.bytes_by_device(row.wanted), strict=True):
            for device, count in part.items():
                total[device] = total.get(device, 0) + count
    return RestoreReads(needed, read, contents.nbytes)


@dataclasses.dataclass(frozen=True)
class RestoredArray:
    """An array to restore: its path and place in the result, its stored form, its sharding and its dtype."""

    path: str
    keys: state_tree.Keys
    entry: StoredArray
    sharding: Sharding
    dtype: Any

    @property
    def wanted(self) -> arrays.ArrayRead:
        """The read of it."""
        return arrays.ArrayRead(self.entry, self.sharding, self.dtype)


def choose_arrays(
    contents: Contents, target: Any, like: Any, only: Globs, name_map: Mapping[str, str] | None, dtype: Any
) -> list[RestoredArray]:
    """The arrays to restore, with their shardings and dtypes. Arguments as of `restore`."""
    problems: list[Problem] = []
    named = rename_arrays(contents.entries, name_map or {})
    stored = {path: entry.path for path, (entry, _) in named.items()}
    paths = _selected(tuple(named), only, "only", problems, tuple(stored.values()))
    problems += nested_arrays({path: named[path] for path in paths})
    wanted = None
    if like is not None:
        wanted = {leaf.path: leaf for leaf in state_tree.flatten(_shapes(like), "like")}
        # Leaves of `like` that `only` does not match are kept, not missing.
        inside = (
            _selected(tuple(wanted), only, "only", [], tuple(stored.get(path, path) for path in wanted))
            if only is not None
            else set(wanted)
        )
        problems += _misfits({p: named[p][0] for p in paths}, {p: leaf for p, leaf in wanted.items() if p in inside})
    if problems:
        raise CheckpointError(problems)
    rows = [(path, *named[path]) for path in named if path in paths]
    if target is None and like is not None:
        target = _shardings_like(like)
    asked = [dataclasses.replace(entry, path=path) for path, entry, _ in rows]
    placed = targets.target_shardings(asked, target, contents)
    found = casts(rows, wanted, dtype)
    return [RestoredArray(path, keys, entry, placed[path], found[path]) for path, entry, keys in rows]


def _shapes(like: Any) -> Any:
    """The tree with shapes instead of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, like)


def _shardings_like(like: Any) -> Any:
    """The shardings of the arrays of a tree; None if no leaf has one."""
    flat = tree_util.tree_flatten_with_path(like)[0]
    found = {join("", key) or state_tree.BARE: getattr(leaf, "sharding", None) for key, leaf in flat}
    first = next((s for s in found.values() if s is not None), None)
    if first is None:
        return None
    replicated = jax.sharding.NamedSharding(first.mesh, jax.sharding.PartitionSpec()) if isinstance(
        first, jax.sharding.NamedSharding) else first  # fmt: skip
    return {path: replicated if sharding is None else sharding for path, sharding in found.items()}


def rename_arrays(
    entries: Sequence[StoredArray], name_map: Mapping[str, str]
) -> dict[str, tuple[StoredArray, state_tree.Keys]]:
    """The entries by their new paths, with the keys of their new places.

    Raises:
      CheckpointError: names that no array has, two arrays with one name.
    """
    problems: list[Problem] = []
    found: dict[str, tuple[StoredArray, state_tree.Keys]] = {}
    used = set()
    spelled = {str(old).strip("/"): str(new).strip("/") for old, new in name_map.items()}
    for entry in entries:
        parts = entry.path.split("/")
        old = next((p for n in range(len(parts), 0, -1) if (p := "/".join(parts[:n])) in spelled), None)
        path, keys = entry.path, entry.keys
        if old is not None:
            used.add(old)
            rest = entry.path[len(old) :]
            path = (spelled[old] + rest).strip("/")
            kept = keys[len(keys) - rest.count("/") :] if len(keys) == len(parts) else ()
            fresh = path.split("/")[: len(path.split("/")) - len(kept)]
            keys = (*(("key", part) for part in fresh if part), *kept)
        if path in found:
            problems.append(
                Problem(
                    f"two arrays would be `{path}`",
                    where=f"{found[path][0].path}, {entry.path}",
                    why="name_map gives one the name of the other",
                    fix="give each a name of its own",
                )
            )
        found[path] = (entry, keys)
    for old in spelled.keys() - used:
        problems.append(
            Problem(
                f"name_map renames `{old}`, which the checkpoint does not hold",
                where=f"name_map = {{{old!r}: {spelled[old]!r}}}",
                why=f"it holds {_some([entry.path for entry in entries])}",
                fix="its keys are paths as they are stored, its values the new ones",
            )
        )
    if problems:
        raise CheckpointError(problems)
    return found


def nested_arrays(found: Mapping[str, tuple[StoredArray, state_tree.Keys]]) -> list[Problem]:
    """The problems of renamed arrays that would be inside another array."""
    places = {tuple(name for _, name in keys): path for path, (_, keys) in found.items()}
    problems = []
    for names, path in places.items():
        for outer in (places[names[:n]] for n in range(len(names)) if names[:n] in places):
            if path != found[path][0].path or outer != found[outer][0].path:
                problems.append(Problem(f"`{path}` would be inside `{outer}`, which is an array",
                                        where=f"{found[path][0].path}, {found[outer][0].path}",
                                        why="only a container can hold arrays",
                                        fix="correct the names in name_map"))  # fmt: skip
    return problems


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:6]) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")


def _selected(
    paths: Sequence[str], globs: Globs, name: str, problems: list[Problem], stored: Sequence[str] = ()
) -> set[str]:
    """The paths that globs match, as renamed or, where none matches, as stored."""
    if globs is None:
        return set(paths)
    found: set[str] = set()
    spellings = [[normal(path) for path in names] for names in (paths, stored)]
    for glob in (globs,) if isinstance(globs, str) else tuple(globs):
        hits = met(glob, spellings[0])[0] or met(glob, spellings[1])[0]
        if not hits:
            where = f"{name} = {globs!r:.80}"
            problems.append(Problem(f"`{name}` matches no array of the checkpoint: {glob!r}", where=where,
                                    why=f"it holds {_some(paths)}", fix="correct the path, or remove it"))  # fmt: skip
        found |= {paths[i] for i in hits}
    return found


def _misfits(stored: Mapping[str, StoredArray], wanted: Mapping[str, state_tree.StateLeaf]) -> list[Problem]:
    """The problems of missing, surplus and incompatible leaves."""
    problems = []
    for path, leaf in wanted.items():
        entry = stored.get(path)
        if entry is None:
            problems.append(Problem(f"the checkpoint has no `{path}`", where=f"like: {path}: {leaf.dtype}{list(leaf.shape)}",
                                    fix=_near(path, stored.keys() - wanted.keys())))  # fmt: skip
        elif entry.shape != leaf.shape:
            problems.append(Problem(f"`{path}` has the shape {entry.shape} in the checkpoint, and {leaf.shape} in `like`",
                                    where=entry.text, why="restore does not change shapes",
                                    fix="restore it without `like`, then pad or slice it"))  # fmt: skip
        elif family(entry.dtype) != family(leaf.dtype) or entry.kind.startswith(KEY) != leaf.kind.startswith(KEY):
            problems.append(Problem(f"`{path}` is {_noun(entry)} in the checkpoint, and {_noun(leaf)} in `like`",
                                    where=entry.text, why="only floats are cast to floats, ints to ints",
                                    fix="restore it without `like`, then convert it"))  # fmt: skip
    for path in sorted(stored.keys() - wanted.keys()):
        problems.append(Problem(f"the checkpoint has `{path}`, and `like` has not", where=stored[path].text,
                                fix='rename it with name_map, or restrict the restore: only=["params/*"]'))  # fmt: skip
    return problems


def _near(path: str, others: Any) -> str:
    import difflib

    close = difflib.get_close_matches(path, list(others), 1, 0.6)
    if close:
        return f"if it is `{close[0]}` there: name_map={{{close[0]!r}: {path!r}}}"
    return "remove it from `like`, or restrict the restore with only="


def family(dtype: Any) -> str:
    """The family within which dtypes are cast: "float", "int", "complex" or "bool"."""
    kinds = (("float", jnp.floating), ("int", jnp.integer), ("complex", jnp.complexfloating))
    return next((name for name, kind in kinds if jnp.issubdtype(jnp.dtype(dtype), kind)), "bool")


def _noun(leaf: StoredArray | state_tree.StateLeaf) -> str:
    return "a PRNG key" if leaf.kind.startswith(KEY) else str(leaf.dtype)


def casts(
    rows: Sequence[tuple[str, StoredArray, Any]], wanted: Mapping[str, state_tree.StateLeaf] | None, dtype: Any
) -> dict[str, Any]:
    """The dtype of each array: that of `dtype`, else of `like`, else the stored one."""
    found = {}
    for path, entry, _ in rows:
        found[path] = entry.numpy_dtype
        # A Python number has no dtype: it keeps the stored one.
        if wanted is not None and wanted[path].kind == "array" and entry.kind == "array":
            found[path] = jnp.dtype(wanted[path].dtype)
    by_glob = dtype if isinstance(dtype, Mapping) else {} if dtype is None else {None: dtype}
    problems: list[Problem] = []
    for glob, kind in by_glob.items():
        try:
            kind = jnp.dtype(kind)
        except TypeError:
            fail(
                CheckpointError,
                f"{kind!r:.40} is not a dtype",
                where=f"dtype = {dtype!r:.80}",
                fix="write jnp.bfloat16",
            )
        for path in _selected(tuple(found), glob, "dtype", problems):
            if family(found[path]) == "float" and family(kind) == "float":
                found[path] = kind
    if problems:
        raise CheckpointError(problems)
    return found

"""`restore`: a step of a folder into any layout, each device reading what it needs; and what that would read."""

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
    """Read a checkpoint into any layout, on any devices, in any number of processes; each reads what its devices hold.

    Args:
      path: the folder that `save` was called with.
      target: where the arrays go: a plan, a layout file or the name of a recipe, a `Mesh` (the stored axes by name), a
        device ("cpu", `jax.devices()[0]`), a list of devices (whole on each), a sharding, or a tree of shardings by path.
        None: as the arrays of `like` lie, else as they lay when they were saved.
      like: a tree of arrays or shapes to give the result its structure, shapes and dtypes. Without it the result is dicts
        and lists: a module or a named tuple becomes a dict of its fields. Arrays of 64 bits are NumPy arrays while JAX's
        `jax_enable_x64` is off.
      step: which step; the last if None.
      only: globs of the paths to restore, as stored or as renamed; the rest of `like` is given back as it is, the rest of
        the checkpoint not read.
      name_map: new paths by stored ones, of arrays or of containers: {"encoder": "model/encoder"}.
      dtype: what floating-point arrays are cast to while they are read, `jnp.bfloat16` say; or a dict of dtypes by glob.

    Raises:
      CheckpointError: there is no such step; leaves that are missing, that are too many, of other shapes, all together.
      CheckpointFileError: files that are missing, cut short or changed, by name. Nothing is loaded then.
      ShardError: a layout that does not fit the arrays or the devices.

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
    """The arrays, if every file that they were read from is whole and of this step."""
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
    """What a restore reads, by device: bytes that it holds afterwards, and bytes of the chunks that hold them.

    Both count elements as they are stored, before they are packed; on disk they are fewer.
    """

    needed: Mapping[Any, int]
    read: Mapping[Any, int]
    whole: int

    def __str__(self) -> str:
        rows = [f"{'device':<24}{'needed B':>16}{'read B':>16}{'more':>8}"]
        for device, needed in self.needed.items():
            more = self.read[device] / needed - 1 if needed else 0.0
            rows.append(f"{device!s:<24}{needed:>16,}{self.read[device]:>16,}{more:>8.1%}")
        return "\n".join([*rows, f"the checkpoint holds {self.whole:,} B"])


def reads(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    like: Any = None,
    step: int | None = None,
    only: Globs = None,
    name_map: Mapping[str, str] | None = None,
) -> RestoreReads:
    """What a restore with these arguments would read for each device of this process. Only the description is read.

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
    """An array to restore: under which path, as what is stored of it, where to and in which dtype."""

    path: str
    keys: state_tree.Keys
    entry: StoredArray
    sharding: Sharding
    dtype: Any

    @property
    def wanted(self) -> arrays.ArrayRead:
        """What the reader is asked for."""
        return arrays.ArrayRead(self.entry, self.sharding, self.dtype)


def choose_arrays(
    contents: Contents, target: Any, like: Any, only: Globs, name_map: Mapping[str, str] | None, dtype: Any
) -> list[RestoredArray]:
    """Which arrays of a checkpoint are wanted, where and how."""
    problems: list[Problem] = []
    named = rename_arrays(contents.entries, name_map or {})
    stored = {path: entry.path for path, (entry, _) in named.items()}
    paths = _selected(tuple(named), only, "only", problems, tuple(stored.values()))
    problems += nested_arrays({path: named[path] for path in paths})
    wanted = None
    if like is not None:
        wanted = {leaf.path: leaf for leaf in state_tree.flatten(_shapes(like), "like")}
        # What `only` does not name stays as it is in `like`, and is not missing.
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
        target = _lies_like(like)
    asked = [dataclasses.replace(entry, path=path) for path, entry, _ in rows]
    placed = targets.target_shardings(asked, target, contents)
    found = casts(rows, wanted, dtype)
    return [RestoredArray(path, keys, entry, placed[path], found[path]) for path, entry, keys in rows]


def _shapes(like: Any) -> Any:
    """The shapes of a tree: no array of it is needed."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, like)


def _lies_like(like: Any) -> Any:
    """The shardings that the arrays of a tree have, or None where one of them has none."""
    flat = tree_util.tree_flatten_with_path(like)[0]
    found = {join("", key) or state_tree.BARE: getattr(leaf, "sharding", None) for key, leaf in flat}
    first = next((s for s in found.values() if s is not None), None)
    if first is None:
        return None
    whole = jax.sharding.NamedSharding(first.mesh, jax.sharding.PartitionSpec()) if isinstance(
        first, jax.sharding.NamedSharding) else first  # fmt: skip
    return {path: whole if sharding is None else sharding for path, sharding in found.items()}


def rename_arrays(
    entries: Sequence[StoredArray], name_map: Mapping[str, str]
) -> dict[str, tuple[StoredArray, state_tree.Keys]]:
    """The entries by their new paths, with the keys of their places.

    Raises:
      CheckpointError: names that nothing has, two arrays of one name.
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
    """Arrays that would lie inside of another array, for a new name."""
    places = {tuple(name for _, name in keys): path for path, (_, keys) in found.items()}
    problems = []
    for names, path in places.items():
        for outer in (places[names[:n]] for n in range(len(names)) if names[:n] in places):
            if path != found[path][0].path or outer != found[outer][0].path:
                problems.append(Problem(f"`{path}` would lie inside of `{outer}`, which is an array",
                                        where=f"{found[path][0].path}, {found[outer][0].path}",
                                        why="what has arrays in it is a container, and no array",
                                        fix="correct the names in name_map"))  # fmt: skip
    return problems


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:6]) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")


def _selected(
    paths: Sequence[str], globs: Globs, name: str, problems: list[Problem], stored: Sequence[str] = ()
) -> set[str]:
    """The paths that globs meet, by what they are called or, where that meets nothing, by what they were stored as."""
    if globs is None:
        return set(paths)
    found: set[str] = set()
    spellings = [[normal(path) for path in names] for names in (paths, stored)]
    for glob in (globs,) if isinstance(globs, str) else tuple(globs):
        hits = met(glob, spellings[0])[0] or met(glob, spellings[1])[0]
        if not hits:
            destinations = f"{name} = {globs!r:.80}"
            problems.append(Problem(f"`{name}` names nothing that the checkpoint holds: {glob!r}", where=destinations,
                                    why=f"it holds {_some(paths)}", fix="correct the path, or leave it out"))  # fmt: skip
        found |= {paths[i] for i in hits}
    return found


def _misfits(stored: Mapping[str, StoredArray], wanted: Mapping[str, state_tree.StateLeaf]) -> list[Problem]:
    """Missing, extra and unlike leaves."""
    problems = []
    for path, leaf in wanted.items():
        entry = stored.get(path)
        if entry is None:
            problems.append(Problem(f"the checkpoint has no `{path}`", where=f"like: {path}: {leaf.dtype}{list(leaf.shape)}",
                                    fix=_near(path, stored.keys() - wanted.keys())))  # fmt: skip
        elif entry.shape != leaf.shape:
            problems.append(Problem(f"`{path}` has the shape {entry.shape} in the checkpoint, and {leaf.shape} is wanted",
                                    where=entry.text, why="a shape is never changed while it is read",
                                    fix="restore it as it is, and pad or cut it then"))  # fmt: skip
        elif family(entry.dtype) != family(leaf.dtype) or entry.kind.startswith(KEY) != leaf.kind.startswith(KEY):
            problems.append(Problem(f"`{path}` is {_noun(entry)} in the checkpoint, and {_noun(leaf)} is wanted",
                                    where=entry.text, why="only floats are cast to floats, ints to ints",
                                    fix="restore it as it is, and convert it then"))  # fmt: skip
    for path in sorted(stored.keys() - wanted.keys()):
        problems.append(Problem(f"the checkpoint has `{path}`, and `like` has not", where=stored[path].text,
                                fix='rename it with name_map, or say which to restore: only=["params/*"]'))  # fmt: skip
    return problems


def _near(path: str, others: Any) -> str:
    import difflib

    close = difflib.get_close_matches(path, list(others), 1, 0.6)
    if close:
        return f"if it is `{close[0]}` there: name_map={{{close[0]!r}: {path!r}}}"
    return "take it out of `like`, or name what there is with only="


def family(dtype: Any) -> str:
    """Within which dtypes are cast: "float", "int", "complex" or "bool"."""
    kinds = (("float", jnp.floating), ("int", jnp.integer), ("complex", jnp.complexfloating))
    return next((name for name, kind in kinds if jnp.issubdtype(jnp.dtype(dtype), kind)), "bool")


def _noun(leaf: StoredArray | state_tree.StateLeaf) -> str:
    return "a PRNG key" if leaf.kind.startswith(KEY) else str(leaf.dtype)


def casts(
    rows: Sequence[tuple[str, StoredArray, Any]], wanted: Mapping[str, state_tree.StateLeaf] | None, dtype: Any
) -> dict[str, Any]:
    """The dtype of each array: as stored, as `like` has it, as `dtype` says; the last that speaks of it."""
    found = {}
    for path, entry, _ in rows:
        found[path] = entry.numpy_dtype
        # A Python number has no dtype of its own: 3 is what was stored.
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
                f"{kind!r:.40} is no dtype",
                where=f"dtype = {dtype!r:.80}",
                fix="write jnp.bfloat16",
            )
        for path in _selected(tuple(found), glob, "dtype", problems):
            if family(found[path]) == "float" and family(kind) == "float":
                found[path] = kind
    if problems:
        raise CheckpointError(problems)
    return found

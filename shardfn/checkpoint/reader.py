"""`restore`: read a step under any sharding, each device only what it needs; `reads`: what that would read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.checkpoint import arrays, state_tree, targets
from shardfn.checkpoint.contents import ARRAYS, BARE, EMPTY, KEY, NUMBER, TEXT, Contents, StoredArray
from shardfn.checkpoint.step_folders import StrPath, open_step, read_stored_layout
from shardfn.errors import CheckpointError, Problem, a, closest, did_you_mean, fail, raise_problems
from shardfn.frontend.paths import join, listed, met, near, normal, without_value

Globs = str | Sequence[str] | None
Names = Mapping[str, str] | None


def restore(
    path: StrPath,
    target: Any = None,
    *,
    like: Any = None,
    step: int | None = None,
    only: Globs = None,
    name_map: Names = None,
    dtype: Any = None,
) -> Any:
    """Read a checkpoint under any sharding, on any number of devices and processes; each device reads what it holds.

    Args:
      path: the folder that `save` was called with.
      target: where the arrays go: a plan; a layout file or the name of a recipe; a `Mesh`, for the stored axes by name; a
        device ("cpu", `jax.devices()[0]`); a list of devices, replicated; a sharding, or a tree of shardings by path.
        None: the shardings of the arrays of `like` (those of an `AbstractMesh` are on the mesh of `jax.set_mesh`, or on all
        devices), else those of the plan or layout file that `save` was
        given where its mesh has as many devices as there are here, else the stored ones.
      like: a pytree of arrays or shapes that gives the structure, shapes and dtypes of the result. Without it the result
        is dicts and lists: a module or a named tuple becomes a dict of its fields, or None if it has none.
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
      CheckpointFileError: arrays that are missing or damaged, by name. Nothing is returned then.
      ShardError: the target does not fit the arrays or the devices.

    >>> import tempfile, jax.numpy as jnp
    >>> from shardfn.checkpoint import save
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = save(path, {"w": jnp.arange(8.0), "b": jnp.zeros(2)})
    ...     restore(path, jax.devices()[0], only="w", dtype=jnp.bfloat16)
    {'w': Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=bfloat16)}
    """
    folder, _, contents = open_step(path, step)
    chosen = choose_arrays(contents, like, only, name_map, dtype)
    values = arrays.read_arrays(folder, _array_reads(chosen, target, like, contents))
    leaves = {new: state_tree.restore_leaf(new.kind, value) for (_, new), value in zip(chosen, values, strict=True)}
    if like is None:
        return state_tree.nested(
            {new.keys: leaf for new, leaf in leaves.items()} | empty_nodes(contents, chosen, name_map)
        )
    found = {new.path: leaf for new, leaf in leaves.items()}
    flat, tree = tree_util.tree_flatten_with_path(like)
    placed = [(old, found.get(join("", key) or BARE, old)) for key, old in flat]
    # Orbax has no complex numbers: they are stored as arrays.
    return tree_util.tree_unflatten(tree, [complex(new) if isinstance(old, complex) else new for old, new in placed])


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
    path: StrPath, target: Any = None, *, like: Any = None, step: int | None = None, only: Globs = None, name_map: Names = None
) -> RestoreReads:  # fmt: skip
    """The bytes that a `restore` with the same arguments would read for each device of this process, from the description alone.

    >>> import tempfile, jax, jax.numpy as jnp
    >>> from shardfn import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = checkpoint.save(folder, {"w": jnp.ones((8, 4))})
    ...     print(checkpoint.reads(folder, jax.devices()[0]))
    device                          needed B          read B    more
    cpu:0                                128             128    0.0%
    the checkpoint holds 128 B
    """
    _, _, contents = open_step(path, step)
    needed: dict[Any, int] = {}
    read: dict[Any, int] = {}
    chosen = choose_arrays(contents, like, only, name_map)
    for want in _array_reads(chosen, target, like, contents):
        for total, part in zip((needed, read), arrays.bytes_by_device(want), strict=True):
            for device, count in part.items():
                total[device] = total.get(device, 0) + count
    return RestoreReads(needed, read, contents.nbytes)


class Renamed(NamedTuple):
    """An array as it is stored, and under its path, place and dtype in the result."""

    stored: StoredArray
    new: StoredArray


def choose_arrays(contents: Contents, like: Any, only: Globs, name_map: Names, dtype: Any = None) -> list[Renamed]:
    """The arrays to restore, with their paths and dtypes in the result. Arguments as of `restore`."""
    problems: list[Problem] = []
    named = {row.new.path: row for row in _renamed(contents, name_map) if not row.new.kind.startswith(EMPTY)}
    places = tree_util.tree_flatten_with_path(like)[0] if like is not None else []
    asked = [*dict.fromkeys(join("", key) or BARE for key, _ in places)]
    named = _named_like(named, asked)
    paths = _selected(tuple(named), only, "only", problems, [row.stored.path for row in named.values()])
    chosen = {path: row for path, row in named.items() if path in paths}
    problems += nested_arrays(chosen.values())
    problems += [Problem(f"`{path}` is a text", where=f"checkpoint at `{row.stored.path}`",
                         why="arrays, numbers and PRNG keys are restored here",
                         fix='leave it out, by globs of the others: only=["params/*"]')
                 for path, row in chosen.items() if row.stored.kind == TEXT]  # fmt: skip
    wanted: dict[str, state_tree.StateLeaf] = {}
    if like is not None:
        # Leaves of `like` that `only` does not match are kept, not missing, and may be anything.
        stored = [named[path].stored.path if path in named else path for path in asked]
        inside = _selected(asked, only, "only", [], stored)
        wanted = {leaf.path: leaf for leaf in state_tree.flatten(_shapes(like), "like", inside)}
        problems += _misfits(chosen, wanted)
    dtypes = {path: leaf.dtype for path, leaf in wanted.items() if leaf.kind in ARRAYS}
    raise_problems(problems, CheckpointError)
    for path, (old, new) in chosen.items():
        if new.kind == NUMBER and path in dtypes:  # a number of which `like` makes an array
            chosen[path] = Renamed(old, dataclasses.replace(new, kind=wanted[path].kind))
    found = casts([row.new for row in chosen.values()], dtypes, dtype)
    return [Renamed(old, dataclasses.replace(new, dtype=str(found[new.path]))) for old, new in chosen.values()]


def _renamed(contents: Contents, name_map: Names) -> list[Renamed]:
    """All that the tree of a checkpoint has, under the new paths."""
    return rename_arrays((*contents.entries, *contents.texts, *contents.empty_nodes), name_map or {})


def empty_nodes(contents: Contents, chosen: Sequence[Renamed], name_map: Names) -> dict[state_tree.Keys, Any]:
    """The nodes without arrays of a result, by place. Each is kept where all arrays of the container around it are chosen.

    Args:
      contents: the description of the checkpoint.
      chosen: the arrays of the result. One that is renamed to the place of an empty node, or into it, replaces it.
      name_map: as in `restore`.
    """
    if not contents.empty_nodes:
        return {}
    kept = {old.path for old, _ in chosen}
    around: dict[state_tree.Keys, bool] = {}  # each container of arrays: whether all of them are chosen
    for entry in (*contents.entries, *contents.texts):
        for n in range(len(entry.keys)):
            around[entry.keys[:n]] = around.get(entry.keys[:n], True) and entry.path in kept
    arrays_at = {_names(new.keys) for _, new in chosen}
    filled = {names[:n] for names in arrays_at for n in range(len(names) + 1)}
    found = {}
    for old, new in _renamed(contents, name_map):
        if not old.kind.startswith(EMPTY):
            continue
        names, nearest = (
            _names(new.keys),
            (old.keys[:n] for n in reversed(range(len(old.keys))) if old.keys[:n] in around),
        )
        is_free = names not in filled and not any(names[:n] in arrays_at for n in range(len(names)))
        if is_free and around.get(next(nearest, ()), False):
            found[new.keys] = state_tree.empty_node(old.kind)
    return found


def _names(keys: state_tree.Keys) -> tuple[str, ...]:
    return tuple(name for _, name in keys)


def _named_like(named: Mapping[str, Renamed], wanted: Collection[str]) -> dict[str, Renamed]:
    """The arrays under the paths of `like`, where these differ in the `/value` of a Flax NNX variable alone."""
    places = dict(zip(without_value([*wanted]), wanted, strict=True))
    found = {}
    for (path, row), short in zip(named.items(), without_value([*named]), strict=True):
        new = path if path in wanted else places.get(short, path)
        found[new] = row._replace(new=dataclasses.replace(row.new, path=new))
    return found


def _array_reads(chosen: Sequence[Renamed], target: Any, like: Any, contents: Contents) -> list[arrays.ArrayRead]:
    """The reads of arrays of the contents under the shardings of `target`. Arguments as of `restore`."""
    if target is None and like is not None:
        target = _shardings_like(like)
    if target is None and chosen:
        layout = read_stored_layout(contents.layout) if contents.layout and contents.layout.is_given else None
        kept = targets.stored_shardings([old.without_key_data for old, _ in chosen], layout)
        target = {new.path: kept[old.path] for old, new in chosen}
    placed = targets.target_shardings([new for _, new in chosen], target) if chosen else {}
    return [arrays.ArrayRead(old, placed[new.path], new.numpy_dtype) for old, new in chosen]


def _shapes(like: Any) -> Any:
    """The tree with shapes instead of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, like)


def _shardings_like(like: Any) -> Any:
    """The shardings of the arrays of a tree; None if no leaf has one."""
    flat = tree_util.tree_flatten_with_path(like)[0]
    found = {join("", key) or BARE: getattr(leaf, "sharding", None) for key, leaf in flat}
    first = next((s for s in found.values() if s is not None), None)
    if first is None:
        return None
    replicated = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first
    return {path: replicated if sharding is None else sharding for path, sharding in found.items()}


def rename_arrays(entries: Sequence[StoredArray], name_map: Mapping[str, str]) -> list[Renamed]:
    """The entries under their new paths, with the keys of their new places.

    Raises:
      CheckpointError: names that no array has, two arrays with one name.
    """
    if not isinstance(name_map, Mapping):
        fail(CheckpointError, f"`name_map` is {a(name_map)}", where=f"name_map = {name_map!r:.60}",
             why="it gives new paths by stored ones", fix='write {"encoder": "model/encoder"}')  # fmt: skip
    problems: list[Problem] = []
    found: dict[str, Renamed] = {}
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
        if path in found and entry.kind.startswith(EMPTY):
            continue
        if path in found:
            problems.append(Problem(f"two arrays would be `{path}`", where=f"{found[path].stored.path}, {entry.path}",
                                    why="name_map gives one the name of the other",
                                    fix="give each a name of its own"))  # fmt: skip
        found[path] = Renamed(entry, dataclasses.replace(entry, path=path, keys=keys))
    for old in spelled.keys() - used:
        problems.append(Problem(f"name_map renames `{old}`, which the checkpoint does not hold",
                                where=f"name_map = {{{old!r}: {spelled[old]!r}}}",
                                why=f"it holds {listed([entry.path for entry in entries], 6)}",
                                fix="its keys are paths as they are stored, its values the new ones"))  # fmt: skip
    raise_problems(problems, CheckpointError)
    return list(found.values())


def nested_arrays(rows: Iterable[Renamed]) -> list[Problem]:
    """The problems of renamed arrays that would be inside another array."""
    places = {_names(row.new.keys): row for row in rows}
    problems = []
    for names, row in places.items():
        for outer in (places[names[:n]] for n in range(len(names)) if names[:n] in places):
            if any(stored.path != new.path for stored, new in (row, outer)):
                problems.append(Problem(f"`{row.new.path}` would be inside `{outer.new.path}`, which is an array",
                                        where=f"{row.stored.path}, {outer.stored.path}",
                                        why="only a container can hold arrays",
                                        fix="correct the names in name_map"))  # fmt: skip
    return problems


def _selected(
    paths: Sequence[str], globs: Globs, name: str, problems: list[Problem], stored: Sequence[str] = ()
) -> set[str]:
    """The paths that globs match, as renamed or, where none matches, as stored."""
    if globs is None:
        return set(paths)
    if not isinstance(globs, str | Sequence):
        fail(CheckpointError, f"`{name}` is {a(globs)}", where=f"{name} = {globs!r:.60}",
             why="it is a glob of paths, or several", fix='write "params/*"')  # fmt: skip
    found: set[str] = set()
    spellings = [[normal(path) for path in names] for names in (paths, stored)]
    for glob in (globs,) if isinstance(globs, str) else tuple(globs):
        hits = met(glob, spellings[0])[0] or met(glob, spellings[1])[0]
        if not hits:
            where = f"{name} = {globs!r:.80}"
            problems.append(Problem(f"`{name}` matches no array of the checkpoint: {glob!r}", where=where,
                                    why=f"it holds {listed(paths, 6)}",
                                    fix=did_you_mean(near(glob, spellings[0])) or "correct the path, or remove it"))  # fmt: skip
        found |= {paths[i] for i in hits}
    return found


def _misfits(chosen: Mapping[str, Renamed], wanted: Mapping[str, state_tree.StateLeaf]) -> list[Problem]:
    """The problems of missing, surplus and incompatible leaves."""
    if (inside := _prefix(chosen, wanted)) is not None:
        return [Problem(f"the arrays of `like` are in `{inside}` of the checkpoint", where=f"like: {listed(list(wanted), 3)}",
                        why="`like` has the structure of the checkpoint, or of the part that `only` selects",
                        fix=f'restore(path, like={{"{inside}": like}}, only=["{inside}/*"])["{inside}"]')]  # fmt: skip
    problems = []
    surplus = chosen.keys() - wanted.keys()
    for path, leaf in wanted.items():
        if path not in chosen:
            problems.append(Problem(f"the checkpoint has no `{path}`", where=f"like: {path}: {leaf.dtype}{list(leaf.shape)}",
                                    fix=_near(path, [p for p in surplus if chosen[p].stored.shape == leaf.shape])))  # fmt: skip
            continue
        entry = chosen[path].stored
        if KEY in entry.kind and KEY in leaf.kind and entry.kind != leaf.kind:
            problems.append(Problem(f"`{path}` is a PRNG key of {entry.kind.removeprefix(KEY)} in the checkpoint, and of "
                                    f"{leaf.kind.removeprefix(KEY)} in `like`", where=entry.text,
                                    why="a key belongs to its implementation",
                                    fix=f"jax.random.key(..., impl={entry.kind.removeprefix(KEY)!r}) in `like`"))  # fmt: skip
        elif entry.shape != leaf.shape:
            problems.append(Problem(f"`{path}` has the shape {entry.shape} in the checkpoint, and {leaf.shape} in `like`",
                                    where=entry.text, why="restore does not change shapes",
                                    fix="restore it without `like`, then pad or slice it"))  # fmt: skip
        elif family(entry.dtype) != family(leaf.dtype) or entry.kind.startswith(KEY) != leaf.kind.startswith(KEY):
            problems.append(Problem(f"`{path}` is {_noun(entry)} in the checkpoint, and {_noun(leaf)} in `like`",
                                    where=entry.text, why="only floats are cast to floats, ints to ints",
                                    fix="restore it without `like`, then convert it"))  # fmt: skip
    parts = {path.partition("/")[0] for path in wanted}
    here = (path.partition("/") for path in wanted if path in chosen)
    globs = list(dict.fromkeys(f"{part}/*" if inside else part for part, _, inside in here))
    for part, of_part in itertools.groupby(sorted(surplus), key=lambda path: path.partition("/")[0]):
        same = list(of_part)
        if part in parts or len(same) == 1:
            left_out = "add it to `like`" if part in parts or not globs else f"leave it out: only={globs}"
            problems += [Problem(f"the checkpoint has `{path}`, and `like` has not", where=chosen[path].stored.text,
                                 fix=f"rename it with name_map, or {left_out}") for path in same]  # fmt: skip
        else:
            what = f"the checkpoint has {len(same)} arrays in `{part}`, and `like` has none there"
            left_out = f"leave them out: only={globs}" if globs else "rename them with name_map, or add them to `like`"
            problems.append(Problem(what, where=listed(same, 3), fix=left_out))
    return problems


def _prefix(stored: Collection[str], wanted: Collection[str]) -> str | None:
    """The key of the checkpoint that holds all wanted arrays, where none is wanted by its own path."""
    if not wanted or any(path in stored for path in wanted):
        return None
    keys = dict.fromkeys(path.partition("/")[0] for path in stored)
    return next((key for key in keys if all(f"{key}/{path}" in stored for path in wanted)), None)


def _near(path: str, others: Collection[str]) -> str:
    if close := closest(path, others):
        return f"if it is `{close[0]}` there: name_map={{{close[0]!r}: {path!r}}}"
    return "remove it from `like`, or restrict the restore with only="


def family(dtype: Any) -> str:
    """The family within which dtypes are cast: "float", "int", "complex" or "bool"."""
    kinds = (("float", jnp.floating), ("int", jnp.integer), ("complex", jnp.complexfloating))
    return next((name for name, kind in kinds if jnp.issubdtype(jnp.dtype(dtype), kind)), "bool")


def _noun(leaf: StoredArray | state_tree.StateLeaf) -> str:
    return "a PRNG key" if leaf.kind.startswith(KEY) else str(leaf.dtype)


def casts(entries: Sequence[StoredArray], wanted: Mapping[str, Any], dtype: Any) -> dict[str, np.dtype]:
    """The dtype of each array by its path: that of `dtype`, else the wanted one, else the stored one."""
    # A Python number or a key has no dtype that could be wanted: it keeps the stored one, and its value.
    cast = {e.path for e in entries if e.kind in ARRAYS}
    found = {e.path: jnp.dtype(wanted.get(e.path, e.dtype) if e.path in cast else e.dtype) for e in entries}
    by_glob = dtype if isinstance(dtype, Mapping) else {} if dtype is None else {None: dtype}
    problems: list[Problem] = []
    for glob, kind in by_glob.items():
        try:
            kind = jnp.dtype(kind)
        except TypeError:
            fail(CheckpointError, f"{kind!r:.40} is not a dtype", where=f"dtype = {dtype!r:.80}",
                 fix="write jnp.bfloat16")  # fmt: skip
        hits = _selected(tuple(found), glob, "dtype", problems)
        floats = {path for path in hits & cast if family(found[path]) == "float"}
        if family(kind) == "float":
            found |= dict.fromkeys(floats, kind)
            refused = hits if glob is not None and not floats else set()
        else:
            refused = {path for path in hits if found[path] != kind}
        if refused:
            shown = [entry.text for entry in entries if entry.path in refused]
            problems.append(Problem(f"`dtype` cannot cast to {kind.name}: {listed(shown, 3)}", where=f"dtype = {dtype!r:.80}",
                                    why="`dtype` casts floating-point arrays to other floating-point dtypes",
                                    fix="leave them out of `dtype`, and convert them after `restore`: x.astype(...); `like` "
                                        "casts integers to integers"))  # fmt: skip
    raise_problems(problems, CheckpointError)
    return found

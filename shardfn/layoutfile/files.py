"""Layout files: read by path or by the name of a recipe, written, and held against a tree of arrays.

>>> layout = read("resnet/data-parallel")
>>> shardings(layout, {"conv1.weight": jax.ShapeDtypeStruct((64, 3, 7, 7), "float32")}, 8)["conv1.weight"].spec
P(None, None, None, None)
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax import tree_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.cost.devices.chips import Hardware
from shardfn.errors import Problem, StrategyError, StrategyTypeError, a, fail
from shardfn.frontend.strategy import AUTO, Argument, Leaf, leaves_of, short
from shardfn.ir.model import Axes
from shardfn.layoutfile.mindspore_json import parse_json
from shardfn.layoutfile.toml import MOST_BYTES, parse, sound_part, text_of
from shardfn.mindspore.layout import Layout
from shardfn.planning.layout_rules import LayoutFile, Rule, as_layout, axes_on, laid, matched, no_rule

__all__ = ["LayoutFile", "LayoutFileError", "read", "recipes", "shardings", "write"]


class LayoutFileError(StrategyError):
    """A layout file that cannot be read, or does not fit the arrays or the devices.

    `part` is what of a faulty file can still be held against a model, if anything.
    """

    part: LayoutFile | None = None


def folder() -> pathlib.Path:
    """Where the recipes lie: in the package as installed, beside it in the source tree."""
    here = pathlib.Path(__file__).parent.parent
    installed = here / "layouts"
    return installed if installed.is_dir() else here.parent / "layouts"


def recipes() -> tuple[str, ...]:
    """The names of the recipes that come with the library.

    >>> "llama/fsdp-tp" in recipes()
    True
    """
    return tuple(sorted(p.relative_to(folder()).with_suffix("").as_posix() for p in folder().glob("*/*.toml")))


def read(source: Any) -> LayoutFile:
    """A layout file by its path, a recipe by its name ("llama/fsdp-tp"), or what a plan decides.

    A path ends in `.toml`, or in `.json` for MindSpore's strategy JSON.

    Raises:
      StrategyError: there is no such file, or it is no layout file; all that is wrong with it.
    """
    if isinstance(source, LayoutFile):
        return source
    decided: Any = getattr(source, "decided", None)
    if callable(decided):
        found: Any = decided()
        return found
    if not isinstance(source, str | os.PathLike):
        fail(StrategyTypeError, f"a layout is a path, a name or a plan, not {a(source)}", where=f"layout = {short(source)}",
             why="it is read from a file, or taken from a plan",
             fix=f"use {_some_recipes()}, or a path such as layout.toml")  # fmt: skip
    text = os.fspath(source)
    path = pathlib.Path(text)
    if isinstance(source, str) and path.suffix not in (".toml", ".json") and not path.is_file():
        path = _recipe(text)
    return _parsed(parse_json if path.suffix == ".json" else parse, path, str(text))


def _parsed(parser: Any, path: pathlib.Path, name: str) -> LayoutFile:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError) as error:
        fail(LayoutFileError, f"{short(name)} cannot be read", where=f"layout = {short(name)}", why=_reason(error),
             fix="give the path of a layout file, or the name of a recipe: " + _some_recipes())  # fmt: skip
    if len(data) > MOST_BYTES:
        fail(LayoutFileError, f"{name} is too large for a layout file", where=name,
             why=f"it has more than {MOST_BYTES:,} bytes", fix="use globs: one rule meets the arrays of every layer")  # fmt: skip
    problems: list[Problem] = []
    layout = parser(text, name, problems)
    if layout is None:
        error = LayoutFileError(problems)
        error.part = sound_part(text, name) if parser is parse else None
        raise error
    return layout


def _reason(error: Exception) -> str:
    return "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


def _recipe(name: str) -> pathlib.Path:
    known = recipes()
    if name in known and re.fullmatch(r"[a-z0-9_-]+/[a-z0-9_-]+", name):
        return folder() / f"{name}.toml"
    close = difflib.get_close_matches(name[:80], known, 3, 0.4)
    families = ", ".join(dict.fromkeys(n.split("/")[0] for n in known))
    fail(LayoutFileError, f"there is no layout {short(name)}", where=f"layout = {short(name)}",
         why=f"the recipes are for {families}; a file's path ends in .toml or .json",
         fix=f"did you mean {' or '.join(map(repr, close))}?" if close else f"use {_some_recipes()}, or a path")  # fmt: skip


def _some_recipes() -> str:
    return ", ".join(map(repr, recipes()[:3])) or "a path"


def write(layout: Any, path: str | os.PathLike[str], text: str | None = None) -> None:
    """Write a layout file: the whole of it or nothing, whatever happens meanwhile.

    Raises:
      StrategyError: it cannot be written there.
    """
    target = pathlib.Path(path)
    text = text_of(read(layout)) if text is None else text
    try:
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
            os.replace(part, target)
        except OSError:
            part.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:  # a path that names no file, or that no file can have
        fail(LayoutFileError, f"{short(str(target))} cannot be written", where=f"path = {short(str(target))}", why=str(error),
             fix="make its directory, or write it elsewhere")  # fmt: skip


def shardings(layout: Any, tree: Any, devices: Any = None, *, root: str = "") -> Any:
    """The `NamedSharding` of every array of a tree, as a layout file says.

    Args:
      layout: as `read` takes it. Where it counts pieces instead of naming axes, each array has a grid of its own.
      tree: arrays or their shapes; their paths (`layers/0/w1`) are held against the rules of the arguments.
      devices: a list of devices or a mesh, whose devices are used; a count of devices that are not here, for an
        `AbstractMesh`; `jax.devices()` if None.
      root: what the paths begin with, where the file was made for a function: the argument's name, `params`.

    Raises:
      StrategyError: all that does not fit: arrays without a rule, rules without an array, ranks, axes, cuts, the grid.

    >>> layout = LayoutFile(grid=(("data", None),), arguments=(Rule("w", ("data", 1)),))
    >>> shardings(layout, {"w": jax.ShapeDtypeStruct((8, 2), "float32")}, 4)["w"].shard_shape((8, 2))
    (2, 2)
    """
    layout = read(layout)
    pool, size = _pool(devices)
    problems: list[Problem] = []
    leaves = leaves_of(Argument(root, f"the tree `{root}`" if root else "the tree", tree), problems)
    axes, entries = entries_of(layout, leaves, size, problems, complete=True)
    if problems:
        raise LayoutFileError(problems)
    found = [_sharding(entry, axes, layout.order, pool, size, len(leaf.shape))
             for (entry, _), leaf in zip(entries, leaves, strict=True)]  # fmt: skip
    return tree_util.tree_unflatten(tree_util.tree_structure(tree), found)


def entries_of(
    layout: LayoutFile, leaves: Sequence[Leaf], devices: int, problems: list[Problem], *, complete: bool,
    section: str = "arguments", strict: bool = True, given: Sequence[str] = (),
) -> tuple[Axes, list[tuple[Any, str]]]:  # fmt: skip
    """The grid, and for each leaf what the file says: axes for each dim (a `Spec`), a tuple of cuts, or AUTO; and where.

    Args:
      devices: how many there are.
      problems: receives everything that does not fit.
      complete: whether an array without a rule, or left open by one, is a problem.
      section: "arguments" or "results".
      strict: whether a rule that meets nothing is a problem.
      given: the names of arguments that are data: those of which no array has a rule are cut as `batch` says.
    """
    axes = axes_on(layout, devices, problems)
    count = math.prod(size for _, size in axes) if axes else devices  # of a grid that does not fit, its own: told once
    where = f"{layout.name}: [{section}]"
    rules = matched(getattr(layout, section), leaves, section, layout.name, problems, strict)
    owners = [next((name for name in given if f"{leaf.path}/".startswith(f"{name}/")), None) for leaf in leaves]
    ruled = {owners[i] for i in rules}
    entries: list[tuple[Any, str]] = []
    bare: list[Leaf] = []
    told: dict[tuple[str, str, str], list[Problem]] = {}  # one fault of a rule, however many arrays have it
    for i, leaf in enumerate(leaves):
        rule = rules.get(i)
        if rule is None and section == "arguments":
            if layout.batch is not None and owners[i] is not None and owners[i] not in ruled:
                rule = Rule("batch", (*layout.batch[: len(leaf.shape)], *(1,) * (len(leaf.shape) - len(layout.batch))))
            elif layout.others is not None:
                rule = Rule("others", layout.others)
        if complete and (rule is None or rule.cut is None):
            bare.append(leaf)
        mine: list[Problem] = []
        entry = AUTO if rule is None else laid(rule, leaf, axes, count, where, mine)
        for problem in mine:
            key = rule.glob if rule is not None else "", problem.what.replace(leaf.label, ""), problem.why
            told.setdefault(key, []).append(problem)
        entries.append((entry, f"{layout.name}: {rule.glob}" if rule is not None else ""))
    problems += map(_as_one, told.values())
    problems += no_rule(bare, layout.name)
    return axes, entries


def _as_one(told: Sequence[Problem]) -> Problem:
    first, more = told[0], len(told) - 1
    return (
        dataclasses.replace(first, where=f"{first.where}, and {more} more array{'s' * (more > 1)}") if more else first
    )


def with_layout(
    layout: LayoutFile, leaves: Sequence[Leaf], devices: int, problems: list[Problem], *, section: str = "arguments",
    strict: bool = True, given: Sequence[str] = (), complete: bool = False,
) -> list[Leaf]:  # fmt: skip
    """The arrays of a call, or its results, with what the file says of those of which nothing was said; as `entries_of`."""
    before = len(problems)
    axes, entries = entries_of(
        layout, leaves, devices, problems, complete=complete, section=section, strict=strict, given=given
    )
    if len(problems) > before or (axes and devices != math.prod(size for _, size in axes)):
        return list(leaves)
    found = []
    for leaf, (entry, where) in zip(leaves, entries, strict=True):
        if leaf.entry is AUTO and entry is not AUTO:
            if devices > 1 and axes and not any(isinstance(dim, int) for dim in entry):
                entry = as_layout(entry, axes, layout.order)
            leaf = dataclasses.replace(leaf, entry=entry, where=where, by="file")
        found.append(leaf)
    return found


def _pool(devices: Any) -> tuple[Sequence[Any] | None, int]:
    """The devices, where they are here, and how many there are."""
    if isinstance(devices, int):
        return None, devices
    if isinstance(devices, AbstractMesh):
        return None, devices.size
    if isinstance(devices, Hardware):
        return devices.devices, devices.count
    pool: list[Any] = list(devices.devices.flat) if isinstance(devices, Mesh) else list(devices or jax.devices())
    return pool, len(pool)


def _sharding(
    entry: Any, axes: Axes, order: Sequence[int] | None, pool: Sequence[Any] | None, size: int, ndim: int
) -> NamedSharding:
    if size > 1 and axes and not all(isinstance(cut, int) for cut in entry):
        lay = as_layout(entry, axes, order)
    elif size > 1 and axes:
        lay = as_layout(((),) * ndim, axes, order)
    else:
        lay = Layout.from_strategy(tuple(entry) if size > 1 else (1,) * ndim, size)
    if pool is None:
        return NamedSharding(lay.abstract_mesh(), lay.partition_spec)
    return lay.sharding(pool)

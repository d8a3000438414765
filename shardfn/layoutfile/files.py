"""Read layout files by path or by recipe name, write them, and apply them to a tree of arrays.

>>> layout = read_layout("resnet/data-parallel")
>>> layout_shardings(layout, {"conv1.weight": jax.ShapeDtypeStruct((64, 3, 7, 7), "float32")}, 8)["conv1.weight"].spec
P(None, None, None, None)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax import tree_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.cost.devices.chips import Hardware
from shardfn.errors import Problem, StrategyError, StrategyTypeError, a, closest, did_you_mean, fail
from shardfn.files import atomic_file, open_regular
from shardfn.frontend.meshes import MeshLayout
from shardfn.frontend.other_words import scheme_of
from shardfn.frontend.static_leaves import hide_static, without_static
from shardfn.frontend.strategy import Argument, leaves_of, short
from shardfn.ir.model import Axes
from shardfn.layoutfile.mindspore_json import LAYOUTS, STRATEGIES, layout_of_rows, parse_json, strategy_content, trained
from shardfn.layoutfile.mindspore_protobuf import FIRST_BYTE, strategy_bytes, strategy_rows
from shardfn.layoutfile.plan_file import layout_of_plan, plan_to_toml, rules_of, sources_of
from shardfn.layoutfile.toml import FORMAT, MAX_BYTES, parse_toml, to_toml
from shardfn.planning.layout_rules import LayoutFile, as_layout, rule_entries
from shardfn.planning.plan import Plan, argument_names, op_strategies


class LayoutFileError(StrategyError):
    """A layout file that cannot be read, or does not fit the arrays or the devices.

    `part` holds the valid part of a faulty file, if it can still be compared with a model.
    """

    part: LayoutFile | None = None


def recipes_folder() -> pathlib.Path:
    """The folder of the recipes: in the installed package, or beside it in the source tree."""
    here = pathlib.Path(__file__).parent.parent
    installed = here / "layouts"
    return installed if installed.is_dir() else here.parent / "layouts"


def recipes() -> tuple[str, ...]:
    """The names of the recipes that come with the library.

    Returns:
      The names, such as "llama/fsdp-tp", sorted.

    >>> "llama/fsdp-tp" in recipes()
    True
    """
    folder = recipes_folder()
    return tuple(sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.glob("*/*.toml")))


def read_layout(source: Any, option: str = "layout") -> LayoutFile:
    """A layout file by its path, a recipe by its name, or the decisions of a plan.

    Args:
      source: a path that ends in `.toml`, or that of MindSpore's strategy file, as JSON (`.json`) or ProtoBuf (`.ckpt`); the
        name of a recipe ("llama/fsdp-tp"); a `Plan`; a `LayoutFile`.
      option: what the user gave it as, for messages.

    Raises:
      LayoutFileError: the file does not exist, or is not a valid layout file; all problems together.
      StrategyTypeError: `source` has another type.

    >>> read_layout("gpt2/data-parallel").mesh
    (('data', None),)
    """
    if isinstance(source, LayoutFile):
        return source
    if isinstance(source, Plan):
        return layout_of_plan(source)
    if not isinstance(source, str | os.PathLike):
        fail(StrategyTypeError, f"a layout is a path, a name or a plan, not {a(source)}", where=f"{option} = {short(source)}",
             why="it is read from a file, or taken from a plan",
             fix=f"use {_some_recipes()}, or a path such as layout.toml")  # fmt: skip
    name = os.fspath(source)
    path = pathlib.Path(name)
    is_there = os.path.exists(name) and not os.path.isdir(name)  # a pipe is there too
    if isinstance(source, str) and path.suffix not in (".toml", ".json") and not is_there:
        path = _recipe(name, option)
    _check_name(path, f"{option} = {short(name)}")
    parser = parse_json if path.suffix == ".json" else parse_toml
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
        is_binary = data[:1] == bytes([FIRST_BYTE])
        rows = strategy_rows(data) if is_binary and len(data) <= MAX_BYTES else None
        text = "" if is_binary else data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        is_folder = isinstance(error, IsADirectoryError)
        close = did_you_mean(_near(path)) if isinstance(error, FileNotFoundError) else ""
        close = files_in(path) if is_folder else close
        why = "it is a folder" if is_folder else str(error)
        recipe = f", or the name of a recipe: {_some_recipes()}" if isinstance(source, str) else ""
        fail(LayoutFileError, f"{short(name)} cannot be read", where=f"{option} = {short(name)}",
             why="it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else why,
             fix=close or "give the path of a layout file" + recipe)  # fmt: skip
    if len(data) > MAX_BYTES:
        fail(LayoutFileError, f"{name} is too large for a layout file", where=name, why=f"it has more than {MAX_BYTES:,} bytes",
             fix="use globs: one rule matches the arrays of every layer")  # fmt: skip
    problems: list[Problem] = []
    layout = parser(text, name, problems) if rows is None else layout_of_rows(rows, name, problems)
    if layout is None or problems:
        error = LayoutFileError(problems)
        error.part = layout
        raise error
    return layout


def _check_name(path: pathlib.Path, where: str) -> None:
    if problem := name_problem(path, where):
        raise LayoutFileError(problem)


def name_problem(path: pathlib.Path, where: str) -> Problem | None:
    """The problem of a name that no layout file has."""
    if path.suffix in ("", ".toml", ".json", ".ckpt"):
        return None
    return Problem(f"{short(str(path))} is no name of a layout file", where,
                   "its end says what is in it: .toml or nothing stands for TOML, .json and .ckpt for MindSpore's files",
                   f"name the file {short(str(path.with_suffix('.toml')))}")  # fmt: skip


def files_in(folder: pathlib.Path) -> str:
    """What to write instead of a folder with layout files; "" where there are none."""
    files = [file for file in sorted(folder.glob("*")) if file.suffix in (".json", ".ckpt", ".toml")]
    return f"name a file in it: {', '.join(repr(str(file)) for file in files[:3])}" if files else ""


def _recipe(name: str, option: str) -> pathlib.Path:
    known = recipes()
    if name in known and re.fullmatch(r"[a-z0-9_-]+/[a-z0-9_-]+", name):
        return recipes_folder() / f"{name}.toml"
    close = _near(pathlib.Path(name[:80]))
    style = scheme.style if (scheme := scheme_of(name)) else ""
    families = ", ".join(dict.fromkeys(n.split("/")[0] for n in known))
    fail(LayoutFileError, f"there is no layout {short(name)}", where=f"{option} = {short(name)}",
         why=f"the recipes are for {families}; a file's path ends in .toml, .json or .ckpt",
         fix=f'a style is an option of its own: style="{style}"' if style else did_you_mean(close) or
         f"use {_some_recipes()}, or a path")  # fmt: skip


def _near(path: pathlib.Path) -> list[str]:
    """Layout files that are there, and recipes, whose name looks like a path that is not."""
    folders = dict.fromkeys((path.parent, pathlib.Path()))
    files: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        for file in (file for folder in folders for file in sorted(folder.glob("*"))):
            if _looks_like_layout(file):
                files.setdefault(file.name, str(file))
    close = [name for name in files if pathlib.Path(name).stem == path.stem] or closest(path.name, files)
    return [files[name] for name in close] or closest(re.sub(r"\.(toml|json)$", "", str(path)), recipes(), 0.4)


def _looks_like_layout(file: pathlib.Path) -> bool:
    """Whether a file's name and first bytes are those of a layout file, shardfn's or MindSpore's in JSON."""
    marks = {".toml": (FORMAT,), ".json": (LAYOUTS, STRATEGIES)}.get(file.suffix, ())
    try:
        if not marks or not file.is_file():
            return False
        with open_regular(file) as opened:
            first = opened.read(1 << 16)
    except OSError:
        return False
    return any(mark.encode() in first for mark in marks)


def _some_recipes() -> str:
    return ", ".join(map(repr, recipes()[:3])) or "a path"


def write_layout(layout: Any, path: str | os.PathLike[str], text: str | None = None) -> None:
    """Write a layout file atomically: a failure leaves no partial file.

    Args:
      layout: as `read_layout` takes it.
      path: the file.
      text: the text to write instead of `layout`.

    Raises:
      LayoutFileError: the file cannot be written.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_layout("gpt2/data-parallel", os.path.join(folder, "layout.toml"))
    ...     read_layout(os.path.join(folder, "layout.toml")).mesh
    (('data', None),)
    """
    text = to_toml(read_layout(layout)) if text is None else text
    _write_text(path, text, "path")


def _write_text(path: str | os.PathLike[str], text: str, option: str) -> None:
    _write(pathlib.Path(path), (text.rstrip("\n") + "\n").encode(), option)


def _binary(content: dict[str, Any], path: Any, option: str) -> bytes:
    try:
        return strategy_bytes(content)
    except ValueError as error:
        fail(LayoutFileError, f"{short(str(path))} cannot hold the plan", where=f"{option} = {short(str(path))}", why=str(error),
             fix="save it under a name that ends in .json or .toml")  # fmt: skip


def _write(target: pathlib.Path, content: bytes, option: str = "path") -> None:
    try:
        with atomic_file(target) as file:
            file.write(content)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        fail(LayoutFileError, f"{short(str(target))} cannot be written", where=f"{option} = {short(str(target))}", why=str(error),
             fix="create its folder, or write it elsewhere")  # fmt: skip


def save_plan(plan: Plan, path: str | os.PathLike[str], only_trained: bool = False, option: str = "path") -> None:
    """Write a plan to a file: a layout file, or MindSpore's strategy file where the name ends in `.json` or `.ckpt`
    (ProtoBuf).

    Args:
      plan: the plan.
      path: the file.
      only_trained: write only what look like trainable parameters (`mindspore_json.trained`).
      option: what the user gave the path as, for messages.

    Raises:
      StrategyTypeError: `path` is not a path.
      LayoutFileError: the file cannot be written, or its name ends otherwise than in `.toml`, `.json` or `.ckpt`.
    """
    if not isinstance(path, str | os.PathLike):
        fail(StrategyTypeError, f"a plan is saved to a path, not to {a(path)}", where=f"{option} = {short(path)}",
             why="it is written as one file", fix='write it as plan.save("layout.toml")')  # fmt: skip
    _check_name(pathlib.Path(path), f"{option} = {short(os.fspath(path))}")
    kept = trained(plan.inputs) if only_trained else list(plan.inputs)
    if (suffix := pathlib.Path(path).suffix) in (".json", ".ckpt"):
        content = strategy_content(kept, plan.axes, op_strategies(plan), argument_names(plan))
        if suffix == ".json":
            _write_text(path, json.dumps(content, indent=1), option)
        else:
            _write(pathlib.Path(path), _binary(content, path, option), option)
        return
    layout = layout_of_plan(plan)
    if only_trained:
        layout = dataclasses.replace(layout, arguments=rules_of(kept, plan.inputs), results=(), constraints=(), activations=(),
                                     sources=sources_of(kept))  # fmt: skip
    _write_text(path, plan_to_toml(plan, layout), option)


def layout_shardings(layout: Any, tree: Any, devices: Any = None, *, root: str = "") -> Any:
    """The `NamedSharding` that a layout file gives every array of a tree.

    Args:
      layout: as `read_layout` takes it. Where its rules give numbers of shards, each array gets a mesh of its own.
      tree: a pytree of arrays or shapes; the rules of `[arguments]` match their paths (`layers/0/w1`).
      devices: a list of devices, or a mesh; a device count, for shardings on an `AbstractMesh`; None for `jax.devices()`.
      root: the first part of every path, where the file was made for a function: the argument's name, `params`.

    Returns:
      A pytree of shardings with the structure of `tree`; None for functions in it.

    Raises:
      LayoutFileError: arrays without a rule, rules that match no array, ranks, axes, numbers of shards or a mesh that do
        not fit; all problems together.

    >>> from shardfn.planning.layout_rules import LayoutRule
    >>> layout = LayoutFile(mesh=(("data", None),), arguments=(LayoutRule("w", ("data", 1)),))
    >>> layout_shardings(layout, {"w": jax.ShapeDtypeStruct((8, 2), "float32")}, 4)["w"].shard_shape((8, 2))
    (2, 2)
    """
    layout = read_layout(layout)
    pool, size = _pool(devices)
    problems: list[Problem] = []
    tree = hide_static(tree)
    leaves = leaves_of(Argument(root, f"the tree `{root}`" if root else "the tree", tree), problems)
    layout = dataclasses.replace(layout, every_array_ruled=True)
    axes, entries = rule_entries(layout, leaves, size, problems)
    if problems:
        raise LayoutFileError(problems)
    found = [_sharding(entry, axes, layout.order, pool, size, len(leaf.shape))
             for (entry, _), leaf in zip(entries, leaves, strict=True)]  # fmt: skip
    return without_static(tree_util.tree_unflatten(tree_util.tree_structure(tree), found))


def _pool(devices: Any) -> tuple[Sequence[Any] | None, int]:
    """The local devices, None for a device count or an abstract mesh; and the device count."""
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
    if size > 1 and axes and not all(isinstance(dim, int) for dim in entry):
        lay = as_layout(entry, axes, order)
    elif size > 1 and axes:
        lay = as_layout(((),) * ndim, axes, order)
    else:
        lay = MeshLayout.of_strategy(tuple(entry) if size > 1 else (1,) * ndim, size)
    return lay.sharding(pool)

"""Sources of weights: a folder of steps, safetensors or `.ckpt` files, or the files of the ranks of a training run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardfn.checkpoint import arrays, step_folders
from shardfn.checkpoint.arrays import ArrayRead
from shardfn.checkpoint.chunks import Chunks
from shardfn.checkpoint.contents import Contents, StoredArray
from shardfn.checkpoint.safetensors_files import INDEX, SUFFIX, FileTensor
from shardfn.errors import CheckpointError, Problem, a, fail, raise_problems
from shardfn.frontend.paths import listed
from shardfn.frontend.strategy import short
from shardfn.layoutfile.files import read_layout
from shardfn.mindspore import ckpt_files, rank_checkpoints

KINDS = "a folder of `checkpoint.save`, safetensors (a file, an index, a folder), a `.ckpt` file, or the ranks' files as a list"


@dataclasses.dataclass(frozen=True)
class Source:
    """The arrays of a checkpoint, and how they are read. `text` says what it is."""

    contents: Contents
    read: Callable[[Sequence[ArrayRead]], list[Any]]
    text: str


def open_source(checkpoint: Any, train_strategy: Any, step: int | None, form: str | None, loaded: str = "") -> Source:
    """Open a checkpoint: only its descriptions are read.

    Args:
      checkpoint: a path, or a list of the ranks' files.
      train_strategy: the strategy file of the training run.
      step: of a folder of steps.
      form: None, "safetensors" or "ckpt".
      loaded: the strategy file that the context names, where `train_strategy` is None.

    Raises:
      CheckpointError: it is nothing of the kind; ranks without a strategy; another strategy than the checkpoint's own.
      CheckpointFileError: files that are damaged.
    """
    ranks_strategy = train_strategy or loaded or None
    if isinstance(checkpoint, list | tuple):
        return _ranks([step_folders.absolute_path(file) for file in checkpoint], ranks_strategy)
    path = step_folders.absolute_path(checkpoint)
    if form is None and step_folders.steps(path):
        folder, number, contents = step_folders.open_step(path, step)
        if train_strategy is not None:
            _check_strategies(contents, train_strategy, path)
        return Source(contents, lambda wanted: arrays.read_arrays(folder, wanted), f"{path}, step {number}")
    if path.suffix in (".pkl", ".pt", ".pth", ".bin", ".npz"):
        fail(CheckpointError, f"{path.name} is no file that is read here", where=f"checkpoint = {short(str(path))}",
             why=f"a checkpoint is {KINDS}",
             fix="turn it into safetensors")  # fmt: skip
    if (path / "rank_0").is_dir():
        count = rank_checkpoints.ranks_of(rank_checkpoints.read_strategy(ranks_strategy))
        files = rank_checkpoints.rank_files(path, max(count, len(list(path.glob("rank_*")))))
        return _ranks(list(files.values()), ranks_strategy)
    is_file = path.name.endswith((SUFFIX, INDEX, ckpt_files.SUFFIX)) and path.is_file()
    if not is_file and not any(path.glob("*" + SUFFIX)):
        there = "it has none" if path.exists() else "there is no such file or folder"
        fail(CheckpointError, f"there is no checkpoint in {path}", where=f"checkpoint = {short(str(path))}", why=there,
             fix=f"pass {KINDS}")  # fmt: skip
    if train_strategy is not None:
        fail(CheckpointError, f"{path.name} holds unsharded arrays, and `train_strategy_filename` describes slices",
             where=f"train_strategy_filename = {short(train_strategy)}", why="one file or folder of safetensors is read as it is",
             fix="pass the files of the ranks as a list, or leave train_strategy_filename out")  # fmt: skip
    return _of_tensors([ckpt_files.tensors_of(path)], {}, str(path))


def _ranks(files: Sequence[pathlib.Path], strategy: Any) -> Source:
    layouts = rank_checkpoints.read_strategy(strategy)
    if len(files) > 1 and not layouts:
        fail(CheckpointError, f"there are files of {len(files)} ranks, and no strategy",
             where=f"checkpoint = {_few(files)}",
             why="the strategy file of the training run says how its parameters were sharded",
             fix="pass train_strategy_filename, the file that strategy_ckpt_save_file wrote")  # fmt: skip
    if not files or (layouts and len(files) != rank_checkpoints.ranks_of(layouts)):
        fail(CheckpointError, f"there are files of {len(files)} ranks, and the strategy is for "
                              f"{rank_checkpoints.ranks_of(layouts)}",
             where=f"checkpoint = {_few(files)}", why="each rank has one file",
             fix="pass the file of each rank, in the order of ranks")  # fmt: skip
    return _of_tensors([ckpt_files.tensors_of(file) for file in files], layouts, f"{len(files)} files of ranks")


def _few(files: Sequence[pathlib.Path]) -> str:
    return listed([os.path.join(file.parent.name, file.name) for file in files], 2)


def _of_tensors(files: Sequence[Mapping[str, FileTensor]], layouts: rank_checkpoints.Strategy, text: str) -> Source:
    held = dict(enumerate(files))
    shapes = rank_checkpoints.unsharded_shapes(held, layouts)
    names = {name.replace(".", "/"): name for name in shapes}
    entries = []
    for path, name in names.items():
        shape, dtype = shapes[name]
        keys = tuple(("item" if part.isdecimal() else "key", part) for part in path.split("/"))
        entries.append(StoredArray(path, shape, dtype, keys, (1,) * len(shape), Chunks(shape, shape)))

    def read_one(want: ArrayRead) -> Any:
        name, shape = names[want.entry.path], want.entry.shape
        values = [rank_checkpoints.read_box(name, shape, box, held, layouts) for box, _ in want.boxes]
        return arrays.assemble(want, [value.astype(want.dtype) for value in values])

    return Source(Contents(tuple(entries)), lambda wanted: list(map(read_one, wanted)), text)


def _check_strategies(contents: Contents, strategy: Any, path: pathlib.Path) -> None:
    """Check that a strategy file agrees with the strategies that the checkpoint records."""
    strategies: dict[str, tuple[int, ...]] = {}
    if isinstance(strategy, str | os.PathLike) and str(strategy).endswith((".json", ckpt_files.SUFFIX)):
        rows = rank_checkpoints.read_strategy(strategy)
        strategies = {name.replace(".", "/"): row.strategy for name, row in rows.items()}
    else:
        layout = read_layout(strategy)
        sizes = dict(layout.mesh)
        for rule in layout.arguments:
            dims = [(d,) if isinstance(d, str | int) else d for d in rule.sharding or ("...",)]
            factors = [[n if isinstance(n, int) else sizes.get(n) or 0 for n in dim] for dim in dims]
            if all(n for dim in factors for n in dim) and not set("*?[") & set(rule.glob):
                strategies[rule.glob] = tuple(math.prod(dim) for dim in factors)
    problems = []
    for entry in contents.entries:
        said = strategies.get(entry.path) or strategies.get(entry.path.partition("/")[2])
        if said is not None and len(said) == len(entry.shape) and said != entry.strategy:
            problems.append(Problem(f"`{entry.path}` was saved with the strategy {entry.strategy}, and "
                                    f"`train_strategy_filename` says {said}",
                                    where=f"{path}, train_strategy_filename = {short(strategy)}",
                                    why="the checkpoint itself records its strategy",
                                    fix="leave train_strategy_filename out"))  # fmt: skip
    raise_problems(problems, CheckpointError)


def one_of(checkpoint: Any, unified: Any) -> Any:
    """The checkpoint, or MindSpore's `unified_safetensors_dir` in its place.

    Raises:
      CheckpointError: none or both are given.
    """
    if (checkpoint is None) == (unified is None):
        both = checkpoint is not None
        fail(CheckpointError, "there are two checkpoints" if both else "there is no checkpoint to load",
             where=f"checkpoint = {short(checkpoint)}, unified_safetensors_dir = {short(unified)}",
             why=f"a checkpoint is {KINDS}", fix="pass one of them")  # fmt: skip
    if unified is None:
        return checkpoint
    with contextlib.suppress(TypeError):
        return os.fspath(unified)
    fail(CheckpointError, f"`unified_safetensors_dir` is {a(unified)}", where=f"unified_safetensors_dir = {short(unified)}",
         why="it is a folder with safetensors files", fix="pass its path")  # fmt: skip

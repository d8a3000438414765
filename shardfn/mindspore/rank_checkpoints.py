"""MindSpore's functions on checkpoints by rank (safetensors or `.ckpt`, and strategy files): merge slices and reshard them.

A strategy file has for each parameter the device matrix, the tensor map (for each dim the axis that shards it, counted from
the last; -1 for unsharded) and the shape. Ranks fill the matrix in row-major order. With optimizer parallelism each slice is
sharded again along dim 0, over a group of `opt_weight_shard_size` ranks that are `opt_weight_shard_step` apart.
"""

from __future__ import annotations

import dataclasses
import filecmp
import functools
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardfn.checkpoint import arrays, offline
from shardfn.checkpoint.chunks import Box, box_shape, full_box, inside, overlap, relative, volume
from shardfn.checkpoint.safetensors_files import (
    SUFFIX,
    FileTensor,
    TensorHeader,
    contiguous_boxes,
    write_tensors,
)
from shardfn.checkpoint.step_folders import StrPath, absolute_path
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, a, fail, raise_problems
from shardfn.files import read_bytes
from shardfn.frontend.paths import listed
from shardfn.layoutfile.mindspore_json import checked
from shardfn.layoutfile.mindspore_protobuf import FIRST_BYTE, strategy_rows
from shardfn.mindspore import ckpt_files
from shardfn.mindspore.layout import Layout

MOST_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Sliced:
    """How a parameter is sharded over ranks; `optimizer` is the size and step of the group that shards the slices again."""

    layout: Layout
    shape: tuple[int, ...] | None = None
    optimizer: tuple[int, int] = (1, 1)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.layout.size

    @property
    def strategy(self) -> tuple[int, ...]:
        """The number of shards of each dim, with those of the optimizer's group."""
        shards = self.layout.strategy
        return (shards[0] * self.optimizer[0], *shards[1:]) if shards else ()

    def full(self, held: Sequence[int]) -> tuple[int, ...]:
        """The shape of the unsharded parameter whose slices have the shape `held`."""
        return tuple(n * shards for n, shards in zip(held, self.strategy, strict=True))


Strategy = Mapping[str, Sliced]


@functools.lru_cache(maxsize=8)
def boxes_of(sliced: Sliced, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """The slice of each rank, for a parameter of this shape."""
    held = sliced.layout.slices(shape)
    size, step = sliced.optimizer
    if size == 1:
        return held
    found = []
    for rank, (along, *others) in enumerate(held):
        rows = along.stop - along.start
        if rows % size:
            fail(CheckpointError, f"a slice of {rows} rows cannot be sharded {size} ways", where=f"shape {shape}",
                 why="opt_weight_shard_size shards dim 0 of every slice",
                 fix="use the strategy file that the run wrote")  # fmt: skip
        begin = along.start + rank // step % size * (rows // size)
        found.append((slice(begin, begin + rows // size), *others))
    return tuple(found)


def merge_sliced_parameter(sliced_parameters: Sequence[Any], strategy: Any = None) -> np.ndarray:
    """Merge the slices of one parameter.

    Args:
      sliced_parameters: the slice of each rank, in rank order: arrays of one shape and dtype.
      strategy: the sharding: a `Layout`, or a dict with `dev_matrix` and `tensor_map` as in a strategy file. None joins the
        slices along dim 0.

    Returns:
      The unsharded array.

    Raises:
      CheckpointError: slices that do not fit each other or the strategy.

    >>> halves = [np.zeros((2, 1)), np.ones((2, 1))]
    >>> merge_sliced_parameter(halves, Layout((1, 2), ("x", "y"))("None", "y")).tolist()
    [[0.0, 1.0], [0.0, 1.0]]
    """
    slices = [np.asarray(one) for one in sliced_parameters]
    if not slices:
        fail(CheckpointError, "there are no slices to merge", where="sliced_parameters = []", why="each rank has one",
             fix="pass one for each rank")  # fmt: skip
    first = slices[0]
    problems = [
        Problem(f"slice {rank} is {one.dtype}{list(one.shape)}, and slice 0 {first.dtype}{list(first.shape)}",
                why="the slices of a parameter are alike", fix="pass the slices of one parameter, in the order of ranks")
        for rank, one in enumerate(slices)
        if one.dtype != first.dtype or (one.shape[1:] != first.shape[1:] if strategy is None else one.shape != first.shape)
    ]  # fmt: skip
    raise_problems(problems, CheckpointError)
    if strategy is None:
        return np.concatenate(slices) if first.ndim else first
    if not isinstance(strategy, Mapping | Layout):
        fail(CheckpointError, f"a strategy is a Layout or a dict, not {a(strategy)}", where=f"strategy = {strategy!r:.80}",
             why="it says how the parameter is sharded",
             fix='write for instance Layout((2, 4), ("dp", "mp"))("dp", "mp")')  # fmt: skip
    sliced = Sliced(strategy) if isinstance(strategy, Layout) else _sliced("the parameter", strategy)
    if len(slices) != sliced.ranks:
        fail(CheckpointError, f"there are {len(slices)} slices for {sliced.ranks} ranks", where=repr(sliced.layout),
             why="each rank of the device matrix has one", fix="pass one slice for each rank, in order")  # fmt: skip
    if len(sliced.layout.strategy) != first.ndim:
        fail(CheckpointError, f"the slices have {first.ndim} dims, and the strategy {len(sliced.layout.strategy)}",
             where=repr(sliced.layout), why="a strategy has one number for each dimension",
             fix="use the strategy of this parameter")  # fmt: skip
    merged = np.empty(sliced.full(first.shape), first.dtype)
    for box, one in zip(boxes_of(sliced, merged.shape), slices, strict=True):
        merged[box] = one
    return merged


def read_strategy(source: Any) -> dict[str, Sliced]:
    """The layouts of a strategy file (`strategy_ckpt_save_file`), JSON or ProtoBuf, by parameter. {} for None.

    Raises:
      CheckpointFileError: the file is not there, or no strategy file.
    """
    if source is None:
        return {}
    if isinstance(source, Mapping):
        rows: Any = source
    elif not isinstance(source, str | os.PathLike):
        fail(CheckpointError, f"a strategy is a file or a dict, not {a(source)}", where=f"{source!r:.80}",
             why="it says how each parameter is sharded",
             fix="give the JSON that strategy_ckpt_save_file wrote, or its rows")  # fmt: skip
    else:
        file = pathlib.Path(source)
        try:
            content = read_bytes(file, MOST_BYTES)
            is_binary = content[:1] == bytes([FIRST_BYTE])
            rows = (strategy_rows(content) if is_binary else json.loads(content))["parallel_layout_item"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            fail(CheckpointFileError, f"{file} cannot be read", where=f"{source!r:.80}", why=why,
                 fix="give the file that strategy_ckpt_save_file wrote, JSON or ProtoBuf")  # fmt: skip
    if not isinstance(rows, Mapping):
        fail(CheckpointError, f"a strategy is a dict of parameters, not {a(rows)}", where=f"{rows!r:.80}",
             why="it says how each parameter is sharded", fix="give what stands under parallel_layout_item")  # fmt: skip
    return {str(name): row if isinstance(row, Sliced) else _sliced(f"`{name}`", row) for name, row in rows.items()}


def _sliced(name: str, row: Any) -> Sliced:
    try:
        row = json.loads(json.dumps(dict(row) if isinstance(row, Mapping) else row))
    except (TypeError, ValueError):
        row = None
    found = checked(row)
    if isinstance(found, str):
        fail(CheckpointError, f"the strategy of {name} cannot be read", where=f"{row!r:.120}", why=found,
             fix="it has dev_matrix and tensor_map, lists of ints")  # fmt: skip
    matrix, tensor_map, size, step = found
    layout = Layout.from_tensor_map(tuple(matrix), tuple(d[0] if len(d) == 1 else tuple(d) for d in tensor_map))
    shape = row.get("tensor_shape")
    return Sliced(layout, None if shape is None else tuple(shape), (max(size, 1), max(step, 1)))


def rank_list_for_transform(rank_id: int, src_strategy_file: Any = None, dst_strategy_file: Any = None) -> list[int]:
    """The source ranks whose files a destination rank needs.

    Args:
      rank_id: the destination rank.
      src_strategy_file: the strategy JSON of the run that wrote the files; None where each holds all arrays.
      dst_strategy_file: that of the destination; None for one device.

    Returns:
      The source ranks, in order.

    Raises:
      CheckpointError: a rank that the destination does not have, or strategies of other parameters.

    >>> sliced = {"w": {"dev_matrix": [2, 2], "tensor_map": [0, -1], "tensor_shape": [8, 4]}}
    >>> rank_list_for_transform(0, sliced), rank_list_for_transform(3, sliced, sliced)
    ([0, 1], [3])
    """
    source, target = read_strategy(src_strategy_file), read_strategy(dst_strategy_file)
    if type(rank_id) is not int or not 0 <= rank_id < ranks_of(target):
        fail(CheckpointError, f"there is no rank {rank_id!r:.40} in the destination", where=f"rank_id = {rank_id!r:.40}",
             why=f"its ranks are 0 to {ranks_of(target) - 1}", fix="choose one of them")  # fmt: skip
    if not source:
        return [0]
    needed: set[int] = set()
    for name, sliced in source.items():
        other = target.get(name)
        shape = sliced.shape or (other.shape if other else None) or _some_shape(sliced, other)
        needed.update(rank for rank, _ in _sources(name, shape, _box_of(name, shape, rank_id, target), source, rank_id))
    return sorted(needed)


def _some_shape(one: Sliced, other: Sliced | None) -> tuple[int, ...]:
    """A shape that both strategies divide: which ranks have parts of each other's slices does not depend on it."""
    if other is not None and len(other.strategy) != len(one.strategy):
        fail(CheckpointError, "the strategies are for parameters of different ranks", where=f"{one.layout}, {other.layout}",
             why=f"one has {len(one.strategy)} dimensions, the other {len(other.strategy)}",
             fix="use strategy files of one network")  # fmt: skip
    return one.strategy if other is None else tuple(map(math.lcm, one.strategy, other.strategy))


def ranks_of(strategy: Strategy) -> int:
    """How many ranks a strategy is for."""
    return max((sliced.ranks for sliced in strategy.values()), default=1)


def _box_of(name: str, shape: tuple[int, ...], rank: int, strategy: Strategy) -> Box:
    """The box of a parameter that a rank holds: all of it where the strategy does not name the parameter."""
    return boxes_of(strategy[name], shape)[rank % strategy[name].ranks] if name in strategy else full_box(shape)


def _sources(name: str, shape: tuple[int, ...], want: Box, source: Strategy, rank: int) -> list[tuple[int, Box]]:
    """The source ranks that provide a box of a parameter, with the part of each; `rank` is preferred."""
    if name not in source:  # each source rank has all of it
        return [(rank if rank < ranks_of(source) else 0, want)]
    found: dict[str, tuple[int, Box]] = {}
    for holder, box in enumerate(boxes_of(source[name], shape)):
        part = overlap(box, want)
        if part is not None and (repr(box) not in found or holder == rank):  # its own file, where it has the slice
            found[repr(box)] = holder, part
    return list(found.values())


def read_box(
    name: str, shape: tuple[int, ...], box: Box, held: Mapping[int, Mapping[str, FileTensor]], source: Strategy, rank: int = 0
) -> np.ndarray:  # fmt: skip
    """A box of a parameter, from the files of the source ranks.

    Args:
      name: the parameter.
      shape: its unsharded shape.
      box: the part to read.
      held: the tensors of each rank's file.
      source: the strategy of the run that wrote the files.
      rank: the rank whose file is read where several have the same slice.
    """
    values, parts = np.empty(box_shape(box), jnp.dtype(held[0][name].dtype)), _sources(name, shape, box, source, rank)
    assert sum(volume(part) for _, part in parts) == volume(box), f"the slices do not cover {box} of {name}"
    for holder, part in parts:
        origin = _box_of(name, shape, holder, source)
        values[relative(part, box)] = held[holder][name].read(relative(part, origin))
    return values


def transform_checkpoints(
    src_checkpoints_dir: StrPath,
    dst_checkpoints_dir: StrPath,
    ckpt_prefix: str,
    src_strategy_file: Any = None,
    dst_strategy_file: Any = None,
    *,
    memory: int | str = offline.MEMORY,
) -> tuple[pathlib.Path, ...]:
    """Reshard the checkpoint files of the ranks of one run for the ranks of another.

    `src/rank_0/*.safetensors` become `dst/rank_0/prefix0.safetensors`, and so on. A rank without safetensors may have
    `.ckpt` files. If a rank has several files, the last by name is read, with numbers in names compared as numbers.
    Parameters that a strategy does not name are replicated.

    Args:
      src_checkpoints_dir: a folder with `rank_0`, `rank_1`, …
      dst_checkpoints_dir: the folder to write.
      ckpt_prefix: what the files are called: prefix, rank, `.safetensors`.
      src_strategy_file: strategy JSON of the source; None where each rank has all arrays unsharded.
      dst_strategy_file: that of the destination; None for one device.
      memory: most bytes in memory at once, as a number or as "256MiB".

    Returns:
      The files that were written, by rank.

    Raises:
      CheckpointError: ranks or parameters that are missing, slices that do not fit the strategy; all at once.
      CheckpointFileError: a truncated file, or no safetensors; a full disk.

    >>> import os, tempfile, jax.numpy as jnp
    >>> from shardfn import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run, source, target = (os.path.join(folder, name) for name in ("run", "source", "target"))
    ...     _ = checkpoint.save(run, {"w": jnp.ones((8, 4))})
    ...     os.makedirs(os.path.join(source, "rank_0"))
    ...     _ = checkpoint.export_safetensors(run, os.path.join(source, "rank_0", "checkpoint0.safetensors"))
    ...     [file.name for file in transform_checkpoints(source, target, "net")]
    ['net0.safetensors']
    """
    bound = offline.memory_bytes(memory)
    source, target = read_strategy(src_strategy_file), read_strategy(dst_strategy_file)
    files = rank_files(absolute_path(src_checkpoints_dir), ranks_of(source))
    if not source:
        _refuse_slices(absolute_path(src_checkpoints_dir), files[0])
    held = {rank: ckpt_files.tensors_of(file) for rank, file in files.items()}
    shapes = unsharded_shapes(held, source)
    for which, strategy in (("src_strategy_file", source), ("dst_strategy_file", target)):
        if strategy and shapes and not strategy.keys() & shapes.keys():
            fail(CheckpointError, f"`{which}` names no parameter of the checkpoint", where=f"{which}: {listed([*strategy], 3)}",
                 why=f"the checkpoint has {listed([*shapes], 3)}, and what no strategy names is replicated",
                 fix=_same_names(shapes, strategy))  # fmt: skip
    out, made = absolute_path(dst_checkpoints_dir), []
    most = max(1, bound // offline.SHARE // 8)
    with arrays.write_errors(out):
        for rank in range(ranks_of(target)):
            boxes = {name: _box_of(name, shape, rank, target) for name, (shape, _) in shapes.items()}
            rows = [TensorHeader(name, dtype, box_shape(boxes[name])) for name, (_, dtype) in shapes.items()]
            file = out / f"rank_{rank}" / f"{ckpt_prefix}{rank}{SUFFIX}"
            file.parent.mkdir(parents=True, exist_ok=True)

            def pieces(row: TensorHeader, rank: int = rank, boxes: Mapping[str, Box] = boxes) -> Iterator[np.ndarray]:
                for part in contiguous_boxes(row.shape, most):  # a few rows at a time
                    box = inside(part, boxes[row.name])
                    yield read_box(row.name, shapes[row.name][0], box, held, source, rank)

            write_tensors(file, rows, pieces)
            made.append(file)
    return tuple(made)


def _same_names(stored: Iterable[str], named: Iterable[str]) -> str:
    """The fix for a checkpoint whose parameters have other names than those of a strategy."""
    without = "name_map={{{0!r}: ''}}"
    for name, other in itertools.product(stored, tuple(named)):
        if other.endswith(f".{name}"):
            container = other.removesuffix(f".{name}")
            return f"the strategy's names begin with `{container}.`: leave {without.format(container)} out of export_safetensors"
        if name.endswith(f".{other}"):
            container = name.removesuffix(f".{other}")
            return f"leave `{container}.` out of the names: export_safetensors(..., {without.format(container)})"
    return "use the same names in both: name_map of export_safetensors renames what is written"


def _refuse_slices(folder: pathlib.Path, first: pathlib.Path) -> None:
    """Refuse ranks without a strategy that do not hold the same: what they hold are slices."""
    others = sorted(_files_in(folder / "rank_1"), key=lambda file: _natural(file.name))
    if others and not filecmp.cmp(first, others[-1], shallow=False):
        fail(CheckpointError, "the ranks hold different arrays, and there is no source strategy",
             where=f"{first}, {others[-1]}", why="without one every rank has all arrays unsharded",
             fix="give src_strategy_file, of the run that wrote the files")  # fmt: skip


def rank_files(folder: pathlib.Path, ranks: int) -> dict[int, pathlib.Path]:
    """The last file of each rank, of a folder with `rank_0`, `rank_1`, …"""
    if not folder.is_dir():
        fail(
            CheckpointError,
            f"there is no folder {folder}",
            where=str(folder),
            why="each rank has a folder of its own in it",
            fix="give the folder with rank_0, rank_1, …",
        )
    found, problems = {}, []
    for rank in range(ranks):
        files = sorted(_files_in(folder / f"rank_{rank}"), key=lambda file: _natural(file.name))
        if files:
            found[rank] = files[-1]
        else:
            where = f"{folder / f'rank_{rank}' / '*'}{SUFFIX} or {ckpt_files.SUFFIX}"
            problems.append(Problem(f"there is no file of rank {rank}", where, f"the source has {ranks} ranks",
                                    "bring the files of all ranks together"))  # fmt: skip
    raise_problems(problems, CheckpointError)
    return found


def _files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a folder; without any, the `.ckpt` files."""
    return list(folder.glob("*" + SUFFIX)) or list(folder.glob("*" + ckpt_files.SUFFIX))


def _natural(name: str) -> list[Any]:
    """Numbers in a name as numbers, so that step 10 comes after step 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def unsharded_shapes(
    held: Mapping[int, Mapping[str, FileTensor]], source: Strategy
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each unsharded parameter; every rank's slice has to fit."""
    problems: list[Problem] = []
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    fix = "use the strategy of the run that wrote the files"
    for name in dict.fromkeys(itertools.chain.from_iterable(held.values())):
        lacking = [rank for rank, rows in held.items() if name not in rows]
        if lacking:
            problems.append(Problem(f"rank {lacking[0]} has no `{name}`", where=f"it is missing on ranks {lacking[:8]}",
                                    why="every rank has a slice of every parameter",
                                    fix="bring files of one step together"))  # fmt: skip
            continue
        first = held[0][name]
        shape, stated = first.shape, None
        if sliced := source.get(name):
            dims = len(sliced.layout.strategy)
            if dims != len(first.shape):
                what = f"`{name}` has {len(first.shape)} dims, and its strategy {dims}"
                problems.append(Problem(what, where=repr(sliced.layout), fix=fix))
                continue
            shape, stated = sliced.full(first.shape), sliced.shape
        odd = [r for r, rows in held.items() if (rows[name].shape, rows[name].dtype) != (first.shape, first.dtype)]
        if odd or stated not in (None, shape):
            why = (
                f"rank {odd[0]} has {held[odd[0]][name].shape}"
                if odd
                else f"the strategy says that the unsharded shape is {stated}"
            )
            problems.append(Problem(f"the slices of `{name}` do not fit",
                                    where=f"{first.file}: {first.dtype}{list(first.shape)}", why=why, fix=fix))  # fmt: skip
        found[name] = shape, first.dtype
    raise_problems(problems, CheckpointError)
    return found

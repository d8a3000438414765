"""`run`: a training loop that goes on from its last complete checkpoint, on the devices that are there."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from shardfn import checkpoint
from shardfn.checkpoint.contents import Contents
from shardfn.checkpoint.step_folders import StrPath, folder_for_writing, open_step
from shardfn.cluster.heartbeat import beat, rest
from shardfn.cluster.preemption import STATUS, notices
from shardfn.errors import CheckpointError, CheckpointFileError, Problem, StrategyError, a, fail, raise_problems
from shardfn.frontend.value_checks import integer, option_problems

DAMAGED = "damaged"
"""The folder within that of the checkpoints where steps go that cannot be read."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A run that came to its end.

    Attributes:
      state: the state after the last step.
      value: what the last step returned beside the state; None if this call took no step.
      steps: the number of steps taken in all.
      resumed_from: the step of the checkpoint that this call went on from; None for a new run.
    """

    state: Any
    value: Any
    steps: int
    resumed_from: int | None


def run(
    make_step: Callable[[list[Any]], tuple[Any, Any]],
    data: Any,
    checkpoint_dir: StrPath,
    *,
    steps: int,
    every: int = 100,
    keep: int = 3,
    key: Any = None,
    devices: Sequence[Any] | None = None,
    after_step: Callable[[int, Any], None] | None = None,
    say: Callable[[str], None] = print,
) -> RunResult:
    """Train up to a step, from the last complete checkpoint where there is one.

    A job that was killed runs the same program again, and its losses continue as if nothing had happened: state, data, key and
    step are those of the checkpoint. On the same devices they are equal bit by bit. On more or fewer devices the step is
    planned again, the state is restored into the new shardings, and the batch keeps its global size. Each process of a job
    calls `run`; under `shardfn launch --retries`, a job whose process fails starts again by itself.

    A checkpoint that cannot be read is moved to the folder `damaged`, and the one before it is taken. SIGTERM, with which
    clusters announce that they take a machine away, writes a checkpoint and ends the program.

    Args:
      make_step: `(devices) -> (step, params)`. With a `train.step`, `params` is what its `init` takes; with any other
        `step(state, *batch) -> (state, value)` it is the first state.
      data: batches, or a function `(devices) -> batches`. A `data.load` goes on where the checkpoint was taken, as does any
        iterable whose iterator has `get_state` and `set_state` with data that JSON can hold. Of another one the batches of
        earlier steps are read and dropped. A batch that is a tuple is several arguments of the step.
      checkpoint_dir: the folder of the checkpoints, on a disk that all processes see.
      steps: the number of steps of the run, earlier calls included.
      every: the number of steps between checkpoints, which are written in the background. The last step has one too.
      keep: how many checkpoints to keep.
      key: a PRNG key. The step gets `jax.random.fold_in(key, i)` as its last argument at step `i`. A run that goes on uses
        the key of the checkpoint.
      devices: the devices to train on, some of every process; all by default.
      after_step: called as `(number of steps taken, value)` after each step. It need not wait for the value.
      say: called in process 0 with a line of text when the run goes on from a checkpoint or ends early.

    Returns:
      The last state and value.

    Raises:
      CheckpointError: the checkpoint is of another model.
      CheckpointFileError: no checkpoint can be read; or one cannot be written, and earlier ones are complete.
      ExtraError: the packages of the extra `checkpoint` are not installed.
      StrategyError: an argument is not what it should be; the data end before the run, or have no position where those of
        the checkpoint had one; the step does not fit the devices.
      SystemExit: SIGTERM came, and the checkpoint is written.

    >>> import tempfile, optax
    >>> from shardfn import data, train
    >>> x = np.ones((32, 4), "float32")
    >>> def make_step(devices):
    ...     loss = lambda w, x: jnp.mean((x @ w - 1) ** 2)
    ...     return train.step(loss, optax.sgd(0.1), mode="data_parallel", device=devices), jnp.zeros(4)
    >>> batches = lambda devices: data.load(x, "data_parallel", batch_size=8, epochs=None, device=devices)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = run(make_step, batches, folder, steps=2)
    ...     rest = run(make_step, batches, folder, steps=4, devices=jax.devices()[:4])
    goes on from step 2, saved on 8 devices in 1 process: now 4 devices in 1 process
    >>> first.resumed_from, rest.resumed_from, int(rest.state.step)
    (None, 2, 4)
    """
    _check(steps, every, keep, make_step, after_step, say)
    key = _as_key(key)
    say = say if jax.process_index() == 0 else lambda _: None
    folder = folder_for_writing(checkpoint_dir)
    placed = list(jax.devices() if devices is None else devices)
    batches: Any = data(placed) if callable(data) else data
    if not isinstance(batches, Iterable):
        fail(StrategyError, f"`data` is {a(batches)}, and no batches", where="run(data=...)",
             why="each step takes the next batch",
             fix="give a data.load, another iterable, or a function (devices) -> batches")  # fmt: skip
    iterator = iter(batches)
    step, state = _pair(make_step(placed), "make_step(devices)", "(step, params)")
    if hasattr(step, "init"):
        state = step.init(state, *_arguments(getattr(batches, "shapes", ())), *_key_of(key, 0))
    first, is_new = 0, _of_process_0(len(checkpoint.steps(folder))) == 0
    if not is_new:
        is_free = jax.tree.map(lambda leaf: isinstance(leaf, jax.Array) and not leaf.committed, state)
        state = jax.tree.map(_described, state)  # the arrays' memory is free before others are restored
        first, state, progress, contents = _last_complete(folder, state, say)
        state = jax.tree.map(lambda leaf, free: _uncommitted(leaf) if free else leaf, state, is_free)
        key = _go_on(iterator, first, progress, key)
        before, now = _places(contents.devices, contents.processes), _places(len(placed), jax.process_count())
        say(f"goes on from step {first}, saved on {before}: now {now}")
    saved = lambda: {"state": state, "progress": _progress(iterator, key)}  # noqa: E731
    value = None
    with notices() as is_told_to_end:
        for i in range(first, steps):
            batch = _arguments(_next(iterator, i, steps))
            if i > first:  # the first step compiles, which takes as long as it takes
                beat()
            before = value
            state, value = _pair(step(state, *batch, *_key_of(key, i)), "step(state, *batch)", "(state, value)")
            jax.block_until_ready(before)  # the devices have the next step already
            if after_step is not None:
                after_step(i + 1, value)
            is_told = is_told_to_end(i + 1)
            if (i + 1) % every == 0 or i + 1 == steps or is_told:
                saving = checkpoint.save(folder, saved(), step=i + 1, keep=keep, background=True)
                if i + 1 == steps or is_told:
                    rest()  # the last checkpoint, and what the program does after it, take as long as they take
                    saving.wait()
            if is_told and i + 1 < steps:
                say(f"ends with a checkpoint of step {i + 1}, because SIGTERM came")
                raise SystemExit(STATUS)
    return RunResult(state, value, max(first, steps), None if is_new else first)


def _check(steps: Any, every: Any, keep: Any, make_step: Any, after_step: Any, say: Any) -> None:
    """Refuse numbers that are no counts, and what cannot be called.

    Raises:
      StrategyError: all that is wrong.
    """
    counts = {"steps": steps, "every": every, "keep": keep}
    problems = [p for name, value in counts.items() for p in option_problems(integer(1), name, value)]
    called = (
        ("make_step", make_step, "a function (devices) -> (step, params)"),
        ("after_step", after_step or print, "a function (steps, value), or None"),
        ("say", say, "a function of a text, such as print"),
    )
    problems += [
        Problem(f"`{name}` is {a(value)}", where=f"run({name}=...)", why="it is called", fix=f"give {words}")
        for name, value, words in called if not callable(value)
    ]  # fmt: skip
    raise_problems(problems)


def _as_key(key: Any) -> Any:
    """A PRNG key of the new kind: one of `jax.random.PRNGKey` looks like a part of the batch."""
    if key is None or (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        return key
    try:
        return jax.random.wrap_key_data(key)
    except (TypeError, ValueError) as error:
        fail(StrategyError, f"`key` is {a(key)}, and no PRNG key", where="run(key=...)",
             why=str(error).split("\n")[0], fix="give jax.random.key(0)")  # fmt: skip


def _pair(found: Any, call: str, wanted: str) -> tuple[Any, Any]:
    if not isinstance(found, tuple | list) or len(found) != 2:
        what = f"{len(found)} values" if isinstance(found, tuple | list) else a(found)
        fail(StrategyError, f"{call} returns {what}", where="run(make_step)", why=f"it returns {wanted}",
             fix=f"return {wanted}")  # fmt: skip
    return found[0], found[1]


def _arguments(batch: Any) -> tuple[Any, ...]:
    return batch if isinstance(batch, tuple) else (batch,)


def _key_of(key: Any, step: int) -> tuple[Any, ...]:
    return () if key is None else (jax.random.fold_in(key, step),)


def _described(leaf: Any) -> Any:
    """An array as its shape and sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if isinstance(leaf, jax.Array) else leaf


def _uncommitted(leaf: Any) -> Any:
    """An array on one device that JAX moves to where the other arguments of a function are, as it does a new one."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_uncommitted(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
    return jnp.asarray(np.asarray(leaf))


def _places(devices: int, processes: int) -> str:
    return f"{devices} device{'s'[: devices != 1]} in {processes} process{'es' if processes != 1 else ''}"


def _next(iterator: Iterator[Any], i: int, steps: int) -> Any:
    try:
        return next(iterator)
    except StopIteration:
        fail(StrategyError, f"the data end after {i} of {steps} steps", where=f"run(..., steps={steps})",
             why="each step takes a batch", fix="load with epochs=None, or take fewer steps")  # fmt: skip


# ---- what is saved beside the state: the position in the data, and the key


def _progress(iterator: Iterator[Any], key: Any) -> np.ndarray:
    """The state of the data iterator and the key, as the bytes of a JSON text: an array that a checkpoint holds."""
    held: dict[str, Any] = {}
    if hasattr(iterator, "get_state"):
        held["data"] = iterator.get_state()  # type: ignore[attr-defined]
    if key is not None:
        held["key"] = np.asarray(jax.random.key_data(key)).tolist()
        held["key_impl"] = str(jax.random.key_impl(key))
    return np.frombuffer(json.dumps(held).encode(), np.uint8)


def _go_on(iterator: Iterator[Any], steps: int, progress: np.ndarray, key: Any) -> Any:
    """Move the data to where they were after so many steps; the key of the run."""
    held = json.loads(progress.tobytes())
    if "data" in held:
        if not hasattr(iterator, "set_state"):
            fail(StrategyError, "the data cannot go on where the checkpoint was taken", where="run(data=...)",
                 why=f"the checkpoint has the position of a loader, and a {type(iterator).__name__} has no `set_state`",
                 fix="give the loader that the run began with, or choose another folder")  # fmt: skip
        iterator.set_state(held["data"])  # type: ignore[attr-defined]
    else:
        for _ in itertools.islice(iterator, steps):
            pass
    if "key" not in held:
        return key
    return jax.random.wrap_key_data(jnp.asarray(held["key"], jnp.uint32), impl=held["key_impl"])


# ---- the last checkpoint that every process can read


def _last_complete(
    folder: pathlib.Path, like: Any, say: Callable[[str], None]
) -> tuple[int, Any, np.ndarray, Contents]:
    """Restore the newest step that all processes can read, and put newer ones aside.

    Raises:
      CheckpointFileError: there is none.
    """
    left, damaged, errors = list(checkpoint.steps(folder)), [], []
    while (step := _of_process_0(left.pop() if left else -1)) >= 0:
        found = error = None
        try:
            found = _restore(folder, step, like)
        except CheckpointFileError as problem:
            error = problem
        if _is_everywhere(found is not None):
            assert found is not None
            _put_aside(folder, damaged)
            for bad in damaged:
                say(f"step {bad} cannot be read, and is now in {folder / DAMAGED}")
            return step, *found
        damaged.append(step)
        errors.append(error)
    if errors[0] is not None:
        raise errors[0]
    fail(CheckpointFileError, f"no checkpoint of {folder} can be read",
         where=f"steps {', '.join(map(str, damaged))}", why="another process found damaged files, and names them",
         fix="restore the files, or move the folder away to start anew")  # fmt: skip


def _restore(folder: pathlib.Path, step: int, like: Any) -> tuple[Any, np.ndarray, Contents]:
    _, _, contents = open_step(folder, step)
    count = next((entry.shape for entry in contents.entries if entry.path == "progress"), (0,))
    try:
        found = checkpoint.restore(folder, like={"state": like, "progress": np.zeros(count, np.uint8)}, step=step)
    except CheckpointError as error:
        first, *others = (problem.what for problem in error.problems)
        more = f", and {len(others)} more such" if others else ""
        fail(CheckpointError, "the checkpoint is of another model or optimizer", where=str(folder / str(step)),
             why=f"where `like` is the state that make_step gives: {first}{more}",
             fix="choose another folder, or give the model, optimizer and pipeline stages of the checkpoint")  # fmt: skip
    progress = found["progress"]
    return found["state"], np.asarray(getattr(progress, "addressable_data", lambda _: progress)(0)), contents


def _put_aside(folder: pathlib.Path, steps: Sequence[int]) -> None:
    if not steps:
        return
    if jax.process_index() == 0:
        (folder / DAMAGED).mkdir(exist_ok=True)
        for step in steps:
            shutil.rmtree(folder / DAMAGED / str(step), ignore_errors=True)
            os.rename(folder / str(step), folder / DAMAGED / str(step))
    _is_everywhere(True)  # nobody saves before the steps are away


def _of_process_0(number: int) -> int:
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _is_everywhere(condition: bool) -> bool:
    if jax.process_count() == 1:
        return condition
    return bool(np.all(multihost_utils.process_allgather(np.asarray(condition))))

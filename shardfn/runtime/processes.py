"""What several processes need that one does not: arrays that each has, as one global array; and one plan everywhere."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardfn.errors import StrategyError, fail
from shardfn.layoutfile.plan_file import layout_of_plan
from shardfn.layoutfile.toml import to_toml
from shardfn.planning.plan import Plan, answered_call


def is_local_input(value: Any, target: NamedSharding) -> bool:
    """Whether `value` is an array that only this process holds, and that `jax.jit` with several processes refuses.

    It is a NumPy array, or for devices of several processes a JAX array that is committed to devices of this one.
    """
    if isinstance(value, np.ndarray):
        return jax.process_count() > 1
    if target.is_fully_addressable or not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return False
    return value.committed and value.is_fully_addressable


def is_traced() -> bool:
    """Whether a trace is going on around the caller, such as that of a `jax.jit`."""
    return isinstance(jax.device_put(np.float32(0)), Tracer)  # compiles nothing, as `jnp.zeros` would


def as_global(value: Any, target: NamedSharding) -> jax.Array:
    """The global array of `value`, which every process holds with the same content: each places the shards of its devices.

    Args:
      value: a NumPy array, or a JAX array of this process.
      target: the sharding, over devices of several processes.

    >>> mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    >>> as_global(np.arange(8.0), NamedSharding(mesh, PartitionSpec("x"))).shape
    (8,)
    """
    if is_traced():  # a constant of the traced program, which places it
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, target, lambda index: value[index])


def spans_processes(value: Any) -> bool:
    """Whether `value` is an array over devices of several processes."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer) and not value.is_fully_addressable


def on_host(value: Any) -> Any:
    """A JAX array as a NumPy array, of all processes if it spans some: then each of them must call this. Other values stay.

    >>> on_host(jnp.ones(2)).tolist(), on_host(3)
    ([1.0, 1.0], 3)
    """
    if isinstance(value, Tracer) or not isinstance(value, jax.Array):
        return value
    if value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value.addressable_data(0) if value.is_fully_replicated else value)
    return multihost_utils.process_allgather(value, tiled=True)


def own_copy(value: jax.Array, target: NamedSharding) -> jax.Array:
    """What this process holds of an array that every process holds entirely.

    Raises:
      StrategyError: the array is sharded over several processes.
    """
    if value.is_fully_replicated:
        return value.addressable_data(0)
    fail(StrategyError, f"an array of several processes is wanted on devices of process {jax.process_index()} alone",
         where=f"{value.dtype}{list(value.shape)} with {value.sharding}, for {target.device_set}",
         why="this process holds a part of it only",
         fix="run on devices of all processes, or replicate the array first")  # fmt: skip


def refuse_numpy(name: str) -> NoReturn:
    """Refuse a NumPy array in an eager transformation of the function `name`.

    Raises:
      StrategyError: always.
    """
    fail(StrategyError, f"a transformation of `{name}` has a NumPy array for devices of several processes",
         why="JAX makes no global array of it there",
         fix="jit the transformation, as jax.jit(jax.grad(f)), or pass a global array, which "
             "jax.make_array_from_process_local_data makes")  # fmt: skip


def is_of_several_processes(plan: Plan) -> bool:
    """Whether the devices of a plan are those of more than one process."""
    return len(plan.hardware.processes) > 1


def check_devices(plan: Plan) -> None:
    """Raise where a plan uses devices of other processes only.

    Raises:
      StrategyError: naming this process.
    """
    processes, own = plan.hardware.processes, jax.process_index()
    if processes and own not in processes:
        others = ", ".join(map(str, processes))
        fail(StrategyError, f"process {own} has none of the {plan.hardware.count} devices that `{plan.function}` is planned for",
             where=f"devices of {'processes' if ',' in others else 'process'} {others}",
             why="every process that calls a sharded function runs its own devices' part of it",
             fix="use devices of every process: leave device_num out; or call it in those processes only")  # fmt: skip


def check_same_plan(plan: Plan) -> None:
    """Compare the plans of all processes that have devices of `plan`; each of them must call this.

    Raises:
      StrategyError: a process has another plan. Every process raises it, with the first difference.
    """
    text = _text(plan)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int32)
    codes = np.frombuffer(text.encode("utf-32-le"), np.int32)
    devices = plan.hardware.devices or ()
    rows = _gathered(np.append(digest, np.int32(codes.size)), devices)
    if all((row == rows[0]).all() for row in rows):
        return
    padded = np.pad(codes, (0, int(rows[:, -1].max()) - codes.size))
    texts = [row[row > 0].tobytes().decode("utf-32-le") for row in _gathered(padded, devices)]
    processes = sorted(device.process_index for device in devices)
    first, *others = (next(group) for _, group in itertools.groupby(zip(processes, texts, strict=True), lambda p: p[0]))
    differ = [(process, other) for process, other in others if other != first[1]]
    named = ", ".join(str(process) for process, _ in differ)
    fail(StrategyError, f"`{plan.function}` has another plan in process {named} than in process {first[0]}",
         where=_difference(first, differ[0]), why="all processes run one program, and each its own devices' part of it",
         fix="call it everywhere with the same function, shapes, options and environment, and without time_limit; "
             "or plan once: plan.save(file), then layout=file in every process")  # fmt: skip


def _text(plan: Plan) -> str:
    """What must be the same in all processes, a line for each thing: the shardings as a layout file, shapes, devices, options.

    Who chose a sharding does not count: layout files may lie elsewhere on each host.
    """
    call = answered_call(plan).posed.call
    devices = [(device.process_index, device.id) for device in plan.hardware.devices or ()]
    return "\n".join([
        to_toml(dataclasses.replace(layout_of_plan(plan), sources=(), about="", name="")),
        *(f"{d.path}: {d.dtype}{list(d.shape)}" for d in (*plan.inputs, *plan.outputs)),
        f"donated = {sorted(call.donated)}", f"compiler_options = {sorted(dict(call.compiler_options or {}).items())}",
        f"devices = {devices}",
    ])  # fmt: skip


def _difference(one: tuple[int, str], other: tuple[int, str]) -> str:
    """The first line that differs, as each of two processes has it."""
    (first, mine), (second, theirs) = one, other
    lines = [line for line in difflib.ndiff(mine.splitlines(), theirs.splitlines()) if line[:1] in "+-"]
    shown = {sign: next((line[2:] for line in lines if line[0] == sign), "no such line") for sign in "-+"}
    return f"process {first}: {shown['-']}; process {second}: {shown['+']}"


def _gathered(row: np.ndarray, devices: Sequence[Any]) -> np.ndarray:
    """The rows of all processes, one for each of their devices in the order of processes."""
    mesh = Mesh(np.array(sorted(devices, key=lambda d: (d.process_index, d.id))), ("device",))
    rows = jax.make_array_from_callback(
        (mesh.size, row.size), NamedSharding(mesh, PartitionSpec("device")), lambda _: row[None]
    )
    found = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(rows)
    return np.asarray(found.addressable_data(0))


def _same(x: jax.Array) -> jax.Array:
    return x

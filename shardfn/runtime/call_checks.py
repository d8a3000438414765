"""Calls that are planned but cannot run: where, of what, and for which devices they are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import tree_util
from jax.core import Tracer

from shardfn.cost.devices.hardware import Hardware, used_here
from shardfn.errors import DeviceError, StrategyError, StrategyTypeError, fail
from shardfn.frontend.arguments import Call
from shardfn.frontend.options import Options
from shardfn.frontend.paths import listed
from shardfn.planning.plan import Plan
from shardfn.runtime.apply import lies_elsewhere
from shardfn.units import bytes_text


def refuse_shard_map(name: str) -> None:
    """Refuse a call of the function `name` inside a `shard_map` or `pmap` over all axes.

    Raises:
      StrategyError: it names the axes.
    """
    context = jax.sharding.get_abstract_mesh()
    manual = context.manual_axes
    if manual and math.prod(context.shape[axis] for axis in manual) == context.size:
        named = ", ".join(str(axis) for axis in manual if not str(axis).startswith("_"))
        fail(StrategyError, f"`{name}` is called inside a {'shard_map' if named else 'pmap'}",
             where=f"the axes {named} of the shard_map" if named else "the pmap around it",
             why="there every device already works on its own shard",
             fix="call it outside, and the unsharded function inside: it is the `.fn` of what `shard` returns")  # fmt: skip


def refuse_target(name: str, hardware: Hardware, device: Any) -> None:
    """Refuse to run a plan for hardware that is not here; `device` is the user's option.

    Raises:
      StrategyError: the hardware is only planned for.
    """
    if not hardware.is_here:
        instead = used_here(hardware)
        fail(StrategyError, f"`{name}` is planned for {_target_text(hardware, instead)}",
             where=f"device = {device!r}",
             why="a target is only planned for, and not run on" + (", whatever devices are here" if instead else ""),
             fix=f"use .plan(...) or .explain(...); to run, {instead or 'give a device of this machine'}")  # fmt: skip


def refuse_target_of_report(hardware: Hardware, compiled: bool, run: bool) -> None:
    """Refuse a report of what XLA compiles, or of a run, for hardware that is not here.

    Raises:
      DeviceError: the hardware is only planned for.
    """
    if (compiled or run) and not hardware.is_here:
        instead, option = used_here(hardware), "compiled" if compiled else "run"
        fail(DeviceError, f"nothing can be {'compiled for' if compiled else 'run on'} {_target_text(hardware, instead)}",
             where=f"{option} = True", why="it asks XLA for the devices of this machine, and a target is only planned for",
             fix=f"leave `{option}` out, or use .plan(...).verify(); or "
                 + (instead or "give a device of this machine"))  # fmt: skip


def _target_text(hardware: Hardware, instead: str) -> str:
    return f"{hardware.name}, which is {'a target' if instead else 'not here'}"


def refuse_shapes(name: str, plan: Plan, leaves: Sequence[Any]) -> None:
    """Refuse shapes in the place of arrays.

    Raises:
      StrategyTypeError: it names the arguments.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        fail(StrategyTypeError, f"`{name}` is called with a shape in the place of an array",
             where=", ".join(d.path for d, leaf in zip(plan.inputs, leaves, strict=True)
                             if isinstance(leaf, jax.ShapeDtypeStruct)),
             why="a jax.ShapeDtypeStruct holds no data: it can be planned for",
             fix="pass an array, or use .plan(...), .explain(...) or .lower(...)")  # fmt: skip


def refuse_donated_twice(name: str, call: Call, options: Options) -> None:
    """Refuse arrays whose memory an earlier call took, or that this call would take and read as well.

    Raises:
      StrategyError: it names the arguments.
    """
    leaves = tree_util.tree_leaves(call.dynamic)
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not isinstance(x, Tracer)}
    gone = [i for i, x in arrays.items() if x.is_deleted()]
    if gone:
        fail(StrategyError, f"`{name}` is called with an array that has no memory any more",
             where=listed([call.paths()[i] for i in gone]),
             why="an earlier call took it: the argument was donated there",
             fix="pass the results of that call on, or do not donate the argument")  # fmt: skip
    donated = call.leaves_of(call.positions(options.donate_argnums, options.donate_argnames))
    owner = {id(arrays[i]): i for i in donated if i in arrays}
    twice = [(owner[id(x)], i) for i, x in arrays.items() if owner.get(id(x), i) != i]
    if twice:
        paths = call.paths()
        fail(StrategyError, f"`{name}` takes one array twice, and it is donated",
             where="; ".join(f"{paths[first]} is {paths[other]}" for first, other in twice),
             why="a donated array's memory is used for results, so that nothing else may read it",
             fix="pass a copy (`jnp.copy`), or do not donate the argument")  # fmt: skip


def transfers(plan: Plan, leaves: Sequence[Any], targets: Sequence[Any]) -> tuple[str, ...]:
    """A line for each argument of a call that arrives with another sharding than planned."""
    return tuple(
        f"`{d.path}` arrives with {leaf.sharding} and is transferred in every call: {bytes_text(d.local_bytes)} per device; "
        "fix: move it once, as in jax.device_put(args, plan.in_shardings)"
        for d, leaf, target in zip(plan.inputs, leaves, targets, strict=True)
        if lies_elsewhere(leaf, target) and leaf.committed
    )


def are_usable(leaves: Sequence[Any], donates: bool) -> bool:
    """Whether leaves are no tracers and, where some are donated, each has its memory and stands once: JAX 0.10 crashes else."""
    if not CONCRETE.issuperset(map(type, leaves)):
        return False
    if not donates:
        return True
    return len(set(map(id, leaves))) == len(leaves) and not any(
        [x.is_deleted() for x in leaves if isinstance(x, jax.Array)]
    )


CONCRETE: set[type] = set()
"""Types of array leaves that have been seen and are no tracers."""

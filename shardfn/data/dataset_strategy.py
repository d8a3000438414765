"""The sharding of every array of a batch, by a `dataset_strategy`, on a mesh of its own or on a plan's."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.cost.devices import hardware
from shardfn.cost.devices.hardware import Hardware
from shardfn.errors import (
    DeviceError,
    Problem,
    StrategyError,
    StrategyTypeError,
    closest,
    did_you_mean,
    fail,
    raise_problems,
)
from shardfn.frontend.defaults import Defaults, current
from shardfn.frontend.meshes import mesh_on, partition_spec
from shardfn.frontend.strategy import AUTO, UNKNOWN, Argument, Leaf, leaves_of, match, short
from shardfn.frontend.validation import check
from shardfn.ir.model import Spec, mesh_text
from shardfn.planning.meshes import mesh_of, names_axes, place, place_named
from shardfn.planning.plan import Plan

FULL, PARALLEL = "full_batch", "data_parallel"


@dataclasses.dataclass(frozen=True)
class InputShardings:
    """The arrays of a batch (path, shape, dtype) and their shardings, in pytree order of the inputs."""

    leaves: tuple[Leaf, ...]
    shardings: tuple[NamedSharding, ...]


def input_shardings(
    inputs: Mapping[str, Any],
    strategy: Any,
    *,
    plan: Plan | None = None,
    arguments: Sequence[str] | None = None,
    device: Any = None,
) -> InputShardings:
    """The sharding of every array of the inputs.

    Args:
      inputs: for each input, by name, a pytree of arrays or global shapes.
      strategy: "full_batch" (replicated), "data_parallel", a tuple or a dict with an entry for each input, or None: the
        shardings of the plan's `arguments`, or without a plan the default of the context.
      plan: a plan whose mesh is used.
      arguments: for each input, the argument of the plan that it is passed as.
      device: as in `shard`; not together with a plan.

    Raises:
      StrategyError, StrategyTypeError: all that is wrong with the strategy.
      DeviceError: the devices are not here.

    >>> import jax
    >>> image, label = jax.ShapeDtypeStruct((8, 64, 32), "float32"), jax.ShapeDtypeStruct((8,), "int32")
    >>> found = input_shardings({"image": image, "label": label}, ((2, 4, 1), (2,)))
    >>> [sharding.spec for sharding in found.shardings]
    [P('a', 'b', None), P('a',)]
    """
    problems: list[Problem] = []
    many = [Argument(name, f"input {i} `{name}`", tree) for i, (name, tree) in enumerate(inputs.items())]
    if plan is not None and device is not None:
        fail(StrategyError, "both a plan and devices are given", where=f"device = {short(device)}",
             why="the plan has devices of its own", fix="remove device, or the plan")  # fmt: skip
    if strategy is None and plan is not None:
        return _planned(many, plan, arguments)
    setting = current()
    name = "strategy"
    if strategy is None:
        strategy = setting.dataset_strategy or PARALLEL
        name = "context.dataset_strategy" if setting.dataset_strategy else name
    leaves = _leaves(many, strategy, name, problems)
    target = _devices(device, leaves, setting) if plan is None else plan.hardware
    strategies = [_strategy(leaf, target.count, strategy == PARALLEL, problems) for leaf in leaves]
    raise_problems(problems)
    if plan is not None:
        mesh, specs = _on_plan_mesh(leaves, strategies, plan, problems)
    else:
        mesh, specs = _on_own_mesh(leaves, strategies, target, problems)
    raise_problems(problems)
    return _on_mesh(mesh, leaves, specs)


def _on_mesh(mesh: Mesh, leaves: Sequence[Leaf], specs: Sequence[Spec | None]) -> InputShardings:
    """The arrays with their shardings; without a spec, an array is replicated."""
    full = (spec or ((),) * len(leaf.shape) for leaf, spec in zip(leaves, specs, strict=True))
    return InputShardings(tuple(leaves), tuple(NamedSharding(mesh, partition_spec(spec)) for spec in full))


def _leaves(many: Sequence[Argument], strategy: Any, name: str, problems: list[Problem]) -> tuple[Leaf, ...]:
    """The arrays with their entries."""
    if isinstance(strategy, str):
        if strategy not in (FULL, PARALLEL):
            fail(StrategyError, f"`strategy` cannot be {strategy!r}", where=f"strategy = {strategy!r}",
                 why=f"the words are {FULL!r} and {PARALLEL!r}",
                 fix=did_you_mean(closest(strategy, (FULL, PARALLEL)))
                 or "use one of them, or an entry for each input")  # fmt: skip
        leaves = [leaf for argument in many for leaf in leaves_of(argument, problems)]
        entry = {FULL: lambda leaf: (1,) * len(leaf.shape), PARALLEL: lambda leaf: None}[strategy]
        return tuple(dataclasses.replace(leaf, entry=entry(leaf), where=f"{name} = {strategy!r}") for leaf in leaves)
    if isinstance(strategy, Mapping):
        names = [argument.name for argument in many]
        wrong = [key for key in strategy if key not in names] + [key for key in names if key not in strategy]
        if wrong:
            fail(StrategyError, "the strategy and the source have different inputs",
                 where=f"strategy has {', '.join(map(str, strategy))}; the source has {', '.join(names)}",
                 why=f"{wrong[0]!r} is in one of them only",
                 fix="give each input of the source an entry by its name")  # fmt: skip
        strategy = tuple(strategy[key] for key in names)
    leaves = match(many, strategy, name, problems)
    is_open = next((leaf for leaf in leaves if leaf.entry is AUTO), None)
    if is_open is not None and not problems:
        problems.append(Problem(f"{is_open.label} is AUTO", is_open.source,
                                "data is read before any search: its sharding must be known",
                                "write its strategy, None for data parallel, or pass a plan as plan="))  # fmt: skip
    return tuple(leaves)


def _devices(device: Any, leaves: Sequence[Leaf], setting: Defaults) -> Hardware:
    mesh = mesh_of(leaf.entry for leaf in leaves)
    asked = mesh if device is None and mesh is not None else device
    found = hardware.resolve(asked, count=setting.devices_asked, default=setting.platform)
    setting.check_rank(found.count)
    if found.devices is None:
        instead = hardware.used_here(found)
        fail(DeviceError, f"data cannot be put on {found.name}", where=f"device = {short(device)}",
             why="a target is only planned for" if instead else "its devices are not here",
             fix=instead or 'use devices that are here, such as device="CPU"')  # fmt: skip
    return found


def _strategy(leaf: Leaf, devices: int, must: bool, problems: list[Problem]) -> tuple[int, ...] | None:
    """The strategy of a leaf. With `must`, data parallel is an error where dim 0 does not divide, instead of replicated."""
    if leaf.dtype == UNKNOWN:
        return None
    if must and (not leaf.shape or leaf.shape[0] % devices):
        size = leaf.shape[0] if leaf.shape else 0
        near = max(1, round(size / devices)) * devices
        why = f"{size} is not divisible by {devices}, and data parallel gives each device a shard of the batch"
        problems.append(Problem(f"{leaf.label} cannot be sharded {devices} ways along dimension 0", f"{leaf.where}, {leaf.text}",
                                why if leaf.shape else "it has no dimension",
                                f"choose a batch_size such as {near}, "
                                "or give a tuple of numbers of shards for each input"))  # fmt: skip
        return None
    return check(leaf, devices, problems)


def _tied_dims(leaves: Sequence[Leaf]) -> list[tuple[int, ...]]:
    """Tied dimensions: the batch of all arrays, and dimensions of equal position and size (an image and its mask)."""
    number: dict[tuple[int, int], int] = {}
    return [
        tuple(number.setdefault((dim, size if dim else 0), len(number)) for dim, size in enumerate(leaf.shape))
        for leaf in leaves
    ]


def _plan_mesh(plan: Plan) -> Mesh:
    mesh = plan.mesh
    if isinstance(mesh, AbstractMesh):
        fail(DeviceError, f"the plan of `{plan.function}` is for devices that are not here", where=str(plan.hardware.name),
             why="data is put on devices", fix="plan.with_devices(jax.devices()), or plan again without a target")  # fmt: skip
    return mesh


def _planned(many: Sequence[Argument], plan: Plan, arguments: Sequence[str] | None) -> InputShardings:
    """The sharding of each input is that of the plan's argument."""
    mesh, problems = _plan_mesh(plan), []
    known = list(dict.fromkeys(d.path.partition("/")[0] for d in plan.inputs))
    names = [argument.name for argument in many] if arguments is None else list(arguments)
    if isinstance(arguments, str) or len(names) != len(many) or any(name not in known for name in names):
        fail(StrategyError, "the inputs do not name arguments of the plan",
             where=f"inputs {', '.join(argument.name for argument in many)}; arguments = {short(arguments)}",
             why=f"the arguments of `{plan.function}` are {', '.join(known)}",
             fix=f"name one for each input: arguments={tuple(known[-len(many):])!r}")  # fmt: skip
    leaves, specs = [], []
    for argument, name in zip(many, names, strict=True):
        for leaf in leaves_of(argument, problems):
            path = "/".join([name, *leaf.path.split("/")[1:]])
            found = next((d for d in plan.inputs if d.path == path), None)
            if found is not None and found.shape == leaf.shape:
                leaves.append(leaf)
                specs.append(found.spec)
                continue
            why = f"the plan was made for {found.dtype}{list(found.shape)}" if found else ""
            fix = "plan again with the shapes of the batch, `loader.shapes`, or change batch_size"
            problems.append(Problem(f"{leaf.label} does not fit the plan's `{path}`", leaf.text,
                                    why or f"`{plan.function}` has no such array", fix))  # fmt: skip
    raise_problems(problems)
    return _on_mesh(mesh, leaves, specs)


def _on_own_mesh(
    leaves: Sequence[Leaf], strategies: Sequence[tuple[int, ...] | None], target: Hardware, problems: list[Problem]
) -> tuple[Mesh, Sequence[Spec | None]]:
    """A mesh of the devices for the entries, and their axes."""
    assert target.devices is not None  # `_devices` refuses devices that are not here
    if any(map(names_axes, leaves)):
        placed = place_named(
            leaves, strategies, target.count, target.mesh, problems, target.devices, _tied_dims(leaves)
        )
    else:
        placed = place(leaves, strategies, _tied_dims(leaves), target.count, problems)
    raise_problems(problems)
    axes = placed.axes or (("a", target.count),)
    if target.mesh is not None and tuple(target.mesh.shape.items()) == axes:
        return mesh_on(target.mesh.devices, axes), placed.specs
    return mesh_on([target.devices[i] for i in placed.order or range(target.count)], axes), placed.specs


def _on_plan_mesh(
    leaves: Sequence[Leaf], strategies: Sequence[tuple[int, ...] | None], plan: Plan, problems: list[Problem]
) -> tuple[Mesh, Sequence[Spec | None]]:
    """The mesh of the plan, and the entries as its axes."""
    mesh = _plan_mesh(plan)
    if any(map(names_axes, leaves)):
        fail(StrategyTypeError, "a strategy with named axes and a plan are both given", where=leaves[0].source,
             why="the plan has axes of its own", fix="write integers, or remove the plan")  # fmt: skip
    specs = []
    for leaf, strategy in zip(leaves, strategies, strict=True):
        strategy = strategy or (1,) * len(leaf.shape)
        same = (d.spec for d in plan.inputs if d.shape == leaf.shape and d.strategy == strategy)
        specs.append(next(same, None) or find_axes(plan.axes, strategy))
        if specs[-1] is None:
            problems.append(Problem(f"{leaf.label} cannot be sharded {strategy} on the plan's mesh", leaf.source,
                                    f"no axes of {mesh_text(plan.axes)} have these products",
                                    "use a strategy of the plan's arguments, or remove the plan"))  # fmt: skip
    return mesh, specs


def find_axes(axes: Sequence[tuple[str, int]], strategy: Sequence[int]) -> Spec | None:
    """The first mesh axes whose sizes give the strategy; None where there are none.

    >>> find_axes((("a", 2), ("b", 4)), (1, 8)), find_axes((("a", 2), ("b", 4)), (4, 2)), find_axes((("a", 8),), (2, 4))
    (((), ('a', 'b')), (('b',), ('a',)), None)
    """
    if not strategy:
        return ()
    free = [axis for axis in axes if axis[1] > 1]
    for length in range(len(free) + 1):
        for chosen in itertools.combinations(free, length):
            if math.prod(size for _, size in chosen) == strategy[0]:
                rest = find_axes([axis for axis in free if axis not in chosen], strategy[1:])
                if rest is not None:
                    return (tuple(name for name, _ in chosen), *rest)
    return None

"""A dataset_strategy to the layout of every array of a batch, on a grid of its own or on a plan's."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from shardfn.cost.devices import hardware as hardware_
from shardfn.errors import DeviceError, Problem, StrategyError, StrategyTypeError, fail, raise_problems
from shardfn.frontend.defaults import Defaults, current
from shardfn.frontend.meshes import mesh_on, partition_spec
from shardfn.frontend.strategy import AUTO, UNKNOWN, Argument, Leaf, leaves_of, match, short
from shardfn.frontend.validation import check, check_all
from shardfn.ir.model import Spec
from shardfn.planning.mesh_inference import place
from shardfn.planning.named_shardings import mesh_of, names_axes, place_named
from shardfn.planning.plan import Plan

FULL, PARALLEL = "full_batch", "data_parallel"


@dataclasses.dataclass(frozen=True)
class InputShardings:
    """Where each array of a batch lies: one path, shape, dtype and sharding for each, in pytree order of the inputs."""

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
    """The layout of every array of `inputs`, which holds a pytree of global shapes for each input.

    Args:
      inputs: for each input, by name, its arrays or their shapes.
      strategy: "full_batch", "data_parallel", a tuple with an entry for each input, a dict with an entry for each by
        name, or None: what the `arguments` of the plan are, or without a plan what the context says.
      plan: a plan whose grid is used.
      arguments: for each input the argument of the plan that it goes to.
      device: as in `shard`; of no use beside a plan.

    Raises:
      StrategyError, StrategyTypeError: all that is wrong with the strategy. DeviceError: the devices are not here.

    >>> import jax
    >>> image, label = jax.ShapeDtypeStruct((8, 64, 32), "float32"), jax.ShapeDtypeStruct((8,), "int32")
    >>> laid = input_shardings({"image": image, "label": label}, ((2, 4, 1), (2,)))
    >>> [sharding.spec for sharding in laid.shardings]
    [P('a', 'b', None), P('a',)]
    """
    problems: list[Problem] = []
    many = [Argument(name, f"input {i} `{name}`", tree) for i, (name, tree) in enumerate(inputs.items())]
    if plan is not None and device is not None:
        fail(StrategyError, "both a plan and devices are given", where=f"device = {short(device)}",
             why="the plan says which devices hold what", fix="leave device out, or the plan")  # fmt: skip
    if strategy is None and plan is not None:
        return _as_planned(many, plan, arguments)
    setting = current()
    name = "strategy"
    if strategy is None:
        strategy, name = setting.dataset_strategy or PARALLEL, "context.dataset_strategy"
    leaves = _leaves(many, strategy, name, problems)
    if plan is not None:
        mesh, count = _here(plan), plan.hardware.count
        specs = _on_plan(leaves, plan, strategy == PARALLEL, problems)
        raise_problems(problems)
        return InputShardings(leaves, tuple(_sharding(mesh, spec) for spec in specs))
    count, devices, given = _devices(device, leaves, setting)
    cuts = [_cuts(leaf, count, strategy == PARALLEL, problems) for leaf in leaves]
    if problems and any(names_axes(leaf) for leaf in leaves):
        check_all(leaves, count, [])
    raise_problems(problems)
    if any(names_axes(leaf) for leaf in leaves):
        placed = place_named(leaves, cuts, count, given, problems, devices)
    else:
        placed = place(leaves, cuts, _tied(leaves), count, problems)
    raise_problems(problems)
    axes = placed.axes or (("a", count),)
    order = placed.order or range(count)
    if given is not None and tuple(given.shape.items()) == axes:
        mesh = mesh_on(given.devices, axes)
    else:
        mesh = mesh_on([devices[i] for i in order], axes)
    return InputShardings(leaves, tuple(_sharding(mesh, spec or ((),) * len(leaf.shape))
                              for leaf, spec in zip(leaves, placed.specs, strict=True)))  # fmt: skip


def _sharding(mesh: Mesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(spec))


def _leaves(many: Sequence[Argument], strategy: Any, name: str, problems: list[Problem]) -> tuple[Leaf, ...]:
    """The arrays with their entries."""
    if isinstance(strategy, str):
        if strategy not in (FULL, PARALLEL):
            fail(StrategyError, f"`strategy` cannot be {strategy!r}", where=f"strategy = {strategy!r}",
                 why=f"the words are {FULL!r} and {PARALLEL!r}", fix="use one of them, or cuts for each input")  # fmt: skip
        leaves = [leaf for argument in many for leaf in leaves_of(argument, problems)]
        entry = {FULL: lambda leaf: (1,) * len(leaf.shape), PARALLEL: lambda leaf: None}[strategy]
        return tuple(dataclasses.replace(leaf, entry=entry(leaf), where=f"{name} = {strategy!r}") for leaf in leaves)
    if isinstance(strategy, Mapping):
        names = [argument.name for argument in many]
        wrong = [key for key in strategy if key not in names] + [key for key in names if key not in strategy]
        if wrong:
            fail(StrategyError, "the strategy and the source have other inputs",
                 where=f"strategy has {', '.join(map(str, strategy))}; the source has {', '.join(names)}",
                 why=f"{wrong[0]!r} stands in one of them only",
                 fix="give each input of the source an entry by its name")  # fmt: skip
        strategy = tuple(strategy[key] for key in names)
    leaves = match(many, strategy, name, problems)
    for leaf in leaves:
        if leaf.entry is AUTO and not problems:
            problems.append(
                Problem(
                    f"{leaf.label} is left open",
                    where=leaf.source,
                    why="data is read, not searched: its layout must be known",
                    fix="write its cuts, None for data parallel, or pass the plan that decided it as plan=",
                )
            )
    return tuple(leaves)


def _devices(device: Any, leaves: Sequence[Leaf], setting: Defaults) -> tuple[int, tuple[Any, ...], Mesh | None]:
    mesh = mesh_of(leaf.entry for leaf in leaves)
    asked = mesh if device is None and mesh is not None else device
    found = hardware_.resolve(asked, count=setting.devices_asked, default=setting.platform)
    setting.check_rank(found.count)
    if found.devices is None:
        instead = hardware_.used_here(found)
        fail(DeviceError, f"data cannot be put on {found.name}", where=f"device = {short(device)}",
             why="a target is only planned for" if instead else "its devices are not here",
             fix=instead or 'use devices that are here, such as device="CPU"')  # fmt: skip
    return found.count, tuple(found.devices), found.mesh


def _cuts(leaf: Leaf, devices: int, must: bool, problems: list[Problem]) -> tuple[int, ...] | None:
    """The cuts of a leaf; with `must`, data parallel is an error where dim 0 does not divide, instead of whole."""
    if leaf.dtype == UNKNOWN:
        return None
    if must and (not leaf.shape or leaf.shape[0] % devices):
        size = leaf.shape[0] if leaf.shape else 0
        near = max(1, round(size / devices)) * devices
        problems.append(
            Problem(
                f"{leaf.label} cannot be cut {devices} ways along dimension 0",
                where=leaf.source,
                why=f"{size} is not divisible by {devices}, and data parallel gives each device a part of the batch"
                if leaf.shape
                else "it has no dimension",
                fix=f"choose a batch_size such as {near}, or give a tuple of cuts for each input",
            )
        )
        return None
    return check(leaf, devices, problems)


def _tied(leaves: Sequence[Leaf]) -> list[tuple[int, ...]]:
    """Dims that share axes: the batch of all arrays, and dims of one position and size (a picture and its mask)."""
    number: dict[tuple[int, int], int] = {}
    return [
        tuple(number.setdefault((dim, size if dim else 0), len(number)) for dim, size in enumerate(leaf.shape))
        for leaf in leaves
    ]


def _here(plan: Plan) -> Mesh:
    mesh = plan.mesh
    if isinstance(mesh, AbstractMesh):
        fail(DeviceError, f"the plan of `{plan.function}` is for devices that are not here", where=str(plan.hardware.name),
             why="data is put on devices", fix="plan.with_devices(jax.devices()), or plan again without a target")  # fmt: skip
    return mesh


def _as_planned(many: Sequence[Argument], plan: Plan, arguments: Sequence[str] | None) -> InputShardings:
    """Each input as the plan's argument of that name lies."""
    mesh, problems = _here(plan), []
    known = list(dict.fromkeys(d.path.partition("/")[0] for d in plan.inputs))
    names = [argument.name for argument in many] if arguments is None else list(arguments)
    if isinstance(arguments, str) or len(names) != len(many) or any(name not in known for name in names):
        fail(StrategyError, "it is not said which arguments of the plan the inputs are",
             where=f"inputs {', '.join(argument.name for argument in many)}; arguments = {short(arguments)}",
             why=f"the arguments of `{plan.function}` are {', '.join(known)}",
             fix=f"name one for each input: arguments={tuple(known[-len(many):])!r}")  # fmt: skip
    leaves, shardings = [], []
    for argument, name in zip(many, names, strict=True):
        for leaf in leaves_of(argument, problems):
            path = "/".join([name, *leaf.path.split("/")[1:]])
            found = next((d for d in plan.inputs if d.path == path), None)
            if found is None or found.shape != leaf.shape:
                problems.append(
                    Problem(
                        f"{leaf.label} is not what the plan has as `{path}`",
                        where=leaf.text,
                        why=f"the plan was made for {found.dtype}{list(found.shape)}"
                        if found
                        else f"`{plan.function}` has no such array",
                        fix="plan again with the shapes of the batch, `loader.shapes`, or change batch_size",
                    )
                )
                continue
            leaves.append(leaf)
            shardings.append(_sharding(mesh, found.spec))
    raise_problems(problems)
    return InputShardings(tuple(leaves), tuple(shardings))


def _on_plan(leaves: Sequence[Leaf], plan: Plan, must: bool, problems: list[Problem]) -> list[Spec]:
    """The entries brought onto the axes of a plan's grid."""
    count = plan.hardware.count
    if any(names_axes(leaf) for leaf in leaves):
        fail(StrategyTypeError, "a strategy of named axes is given beside a plan", where=leaves[0].source,
             why="the plan has axes of its own", fix="write integers, or leave the plan out")  # fmt: skip
    cuts = [_cuts(leaf, count, must, problems) for leaf in leaves]
    raise_problems(problems)
    specs: list[Spec] = []
    for leaf, row in zip(leaves, cuts, strict=True):
        row = row or (1,) * len(leaf.shape)
        alike = (d.spec for d in plan.inputs if d.shape == leaf.shape and d.strategy == row)
        spec = next(alike, None) or find_axes(plan.axes, row)
        if spec is None:
            grid = " x ".join(f"{n}={s}" for n, s in plan.axes)
            problems.append(
                Problem(
                    f"{leaf.label} cannot be cut {row} on the plan's grid",
                    where=leaf.source,
                    why=f"no axes of {grid} make up these cuts",
                    fix="cut it as the plan cuts its arguments, or leave the plan out",
                )
            )
        specs.append(spec or ())
    return specs


def find_axes(axes: Sequence[tuple[str, int]], cuts: Sequence[int]) -> Spec | None:
    """Axes of a grid that make up `cuts`, the first ones that fit; None where none do.

    >>> find_axes((("a", 2), ("b", 4)), (1, 8)), find_axes((("a", 2), ("b", 4)), (4, 2)), find_axes((("a", 8),), (2, 4))
    (((), ('a', 'b')), (('b',), ('a',)), None)
    """
    if not cuts:
        return ()
    free = [axis for axis in axes if axis[1] > 1]
    for length in range(len(free) + 1):
        for chosen in itertools.combinations(free, length):
            if math.prod(size for _, size in chosen) == cuts[0]:
                rest = find_axes([axis for axis in free if axis not in chosen], cuts[1:])
                if rest is not None:
                    return (tuple(name for name, _ in chosen), *rest)
    return None

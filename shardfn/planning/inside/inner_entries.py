"""Shardings of values inside a function: entries of sharded functions that it calls, `reshard`, tags, and JAX's own constraints.

A sharded function that is called inside another one marks its arguments and results with its entries (`mark`). The outer call
finds the marks in its jaxpr (`inner_entries`), places them on its own mesh together with its own entries, and writes the
shardings in their place (`constrain_inner`). Constraints on a mesh of the user's are found and replaced in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from shardfn.cost.devices.hardware import Hardware
from shardfn.frontend.meshes import MeshLayout, abstract_mesh, mesh_on
from shardfn.frontend.strategy import AUTO, Leaf
from shardfn.ir.dimension_groups import corresponding
from shardfn.ir.divisors import primes
from shardfn.ir.model import INNER_AXIS, Graph, InnerSpec
from shardfn.ir.op_traits import PARTIAL_READS, REARRANGING
from shardfn.ir.rewrite import equation_line, equations, inner, rebind
from shardfn.ir.specs import strategy_of
from shardfn.planning.meshes import PlanMesh

_READ, _MADE, _NAMED = "shardfn_read", "shardfn_made", "shardfn_named_"
"""Begin the names of the axes on which marks are written: of arguments and results, whose axes only count shards, and of
arguments with an entry that names axes of a mesh."""


@dataclasses.dataclass(frozen=True)
class AsReadInside:
    """The entry of an array that is sharded as a function inside reads the one at `path`, and replicated if none does."""

    path: str


@dataclasses.dataclass(frozen=True)
class InnerEntry:
    """The entry of a value inside: a strategy, or a `MeshLayout` on a mesh of the user's."""

    number: int
    """The number of its jaxpr equation (`rewrite.equations`)."""
    behind: int
    """The number of the equation behind it. A mark may have two: a `custom_jvp_call`, and the constraint inside it."""
    leaf: Leaf
    is_operand: bool = False
    """Whether a function inside reads the value so."""
    open_dims: frozenset[int] = frozenset()
    """Dimensions that the entry leaves to propagation, as the mapped one under `jax.vmap`."""

    @property
    def is_strategy(self) -> bool:
        """Whether it counts shards, rather than naming axes of a mesh."""
        return isinstance(self.leaf.entry, tuple)

    def opened(self, spec: Sequence[tuple[str, ...]]) -> InnerSpec:
        """A sharding of the value with its open dimensions as None."""
        return tuple(None if d in self.open_dims else dim for d, dim in enumerate(spec))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _constrained(x: Any, sharding: NamedSharding) -> Any:
    """`x` with a sharding constraint, which its derivatives do not inherit."""
    return jax.lax.with_sharding_constraint(x, sharding)


@_constrained.defjvp
def _constrained_jvp(sharding: NamedSharding, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return _constrained(primals[0], sharding), tangents[0]


def mark(x: Any, strategy: Sequence[Any] | None, devices: int, is_result: bool = False) -> Any:
    """`x` marked with a strategy, for the call outside; None, and AUTO for a dimension, mark nothing."""
    if strategy is None or devices == 1 or not x.ndim or all(ways is AUTO for ways in strategy):
        return x
    axes = [(f"{_MADE if is_result else _READ}{i}", p) for i, p in enumerate(primes(devices))]
    left, dims = list(axes), list[Any]()
    for ways in strategy:
        taken: list[str] = []
        for axis in list(left) if ways is not AUTO else ():
            if ways % axis[1] == 0:
                ways //= axis[1]
                taken.append(axis[0])
                left.remove(axis)
        dims.append(PartitionSpec.UNCONSTRAINED if ways is AUTO else tuple(taken) or None)
    return _constrained(x, NamedSharding(abstract_mesh(axes), PartitionSpec(*dims)))


def mark_named(x: Any, sharding: NamedSharding) -> Any:
    """`x` marked with the entry of an argument that names axes of a mesh, for the call outside."""

    def named(dim: Any) -> Any:
        names = [dim] if isinstance(dim, str) else dim
        return tuple(f"{_NAMED}{name}" for name in names) if isinstance(names, list | tuple) else dim

    mesh = sharding.mesh
    axes = [(f"{_NAMED}{name}", size) for name, size in mesh.shape.items()]
    marked = abstract_mesh(axes) if isinstance(mesh, AbstractMesh) else mesh_on(mesh.devices.flat, axes)
    own = NamedSharding(marked, PartitionSpec(*map(named, sharding.spec)), memory_kind=sharding.memory_kind)
    return jax.lax.with_sharding_constraint(x, own)


def inner_entries(jaxpr: Any, hardware: Hardware) -> tuple[InnerEntry, ...]:
    """The entries of the values inside a traced call for some hardware."""
    found = []
    for number, eqn, is_reached in equations(jaxpr):
        sharding = _sharding(eqn) if is_reached else None
        shape = tuple(eqn.outvars[0].aval.shape) if sharding is not None else ()
        if sharding is None or not shape or sharding.mesh.size != hardware.count:
            continue
        raw = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
        open_dims = frozenset(d for d, dim in enumerate(raw) if dim is PartitionSpec.UNCONSTRAINED)
        spec = tuple(() if d in open_dims or dim is None else (dim,) if isinstance(dim, str) else tuple(dim)
                     for d, dim in enumerate(raw))  # fmt: skip
        spec = tuple(tuple(name.removeprefix(_NAMED) for name in dim) for dim in spec)
        sizes = {name.removeprefix(_NAMED): size for name, size in sharding.mesh.shape.items()}
        entry: Any = strategy_of(spec, sizes)
        is_mark = _is_mark(sharding)
        if not is_mark:
            ranks = _ranks(sharding, hardware)
            if ranks is None:
                continue
            entry = MeshLayout(tuple(sizes.items()), spec, ranks)
        line = equation_line(eqn)
        at = f" at {line}" if line else ""
        what = "the value with a strategy inside" if is_mark else "the constrained value inside"
        where = f"{'the strategy' if is_mark else 'the constraint'}{at}"
        leaf = Leaf(f"inside{at}", f"{what}{at}", shape, str(eqn.outvars[0].aval.dtype), entry, where)
        is_operand = any(name.startswith((_READ, _NAMED)) for name in sharding.mesh.axis_names)
        behind = number + 1 + (eqn.primitive.name == "custom_jvp_call")
        found.append(InnerEntry(number, behind, leaf, is_operand, open_dims))
    return tuple(found)


def resolve_read_inside(
    leaves: Sequence[Leaf], graph: Graph, inputs: Sequence[int], entries: Sequence[InnerEntry]
) -> tuple[Leaf, ...]:
    """The inputs of a call with strategies in the place of `AsReadInside`."""
    if not any(isinstance(leaf.entry, AsReadInside) for leaf in leaves):
        return tuple(leaves)
    by_number = {entry.number: entry for entry in entries if entry.is_operand}
    read: dict[int, tuple[Any, str]] = {}
    for value, number in graph.inner.items():
        if number in by_number:
            source, stored = _as_stored(graph, value, by_number[number].leaf.entry)
            read.setdefault(source, (stored, by_number[number].leaf.where))
    found = {leaf.path: read[value] for leaf, value in zip(leaves, inputs, strict=True) if read.get(value, (None,))[0]}
    resolved = list(leaves)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf.entry, AsReadInside):
            strategy, where = found.get(leaf.entry.path, ((1,) * len(leaf.shape), leaf.where))
            by = "you" if leaf.entry.path in found else leaf.by
            resolved[i] = dataclasses.replace(leaf, entry=strategy, where=where, by=by)
    return tuple(resolved)


def _as_stored(graph: Graph, value: int, entry: Any) -> tuple[int, Any]:
    """The value of whose elements, or a part of them, one with an entry consists, and its entry; None if none shards it so."""
    is_layout = isinstance(entry, MeshLayout)
    ways = strategy_of(entry.spec, entry.axes) if is_layout else entry
    at = {dim: dim for dim, n in enumerate(ways) if n > 1}
    sharded = len(at)
    while (op := graph.maker(value)) is not None and op.name in _OF_ITS_ELEMENTS and op.rule is not None:
        tied = corresponding(op.rule, op.rule.results[0], op.rule.operands[0])
        value = op.inputs[0]
        at = {dim: tied[own][0] for dim, own in at.items() if own in tied and tied[own][1] % ways[dim] == 0}
    if len(at) < sharded:
        return value, None
    given, rest = (entry.spec, ()) if is_layout else (entry, 1)
    stored: list[Any] = [rest] * len(graph.values[value].shape)
    for dim, own in at.items():
        stored[own] = given[dim]
    return value, dataclasses.replace(entry, spec=tuple(stored)) if is_layout else tuple(stored)


_OF_ITS_ELEMENTS = PARTIAL_READS | REARRANGING | {"sharding_constraint"}


def operands_as_read(graph: Graph, marked: Mapping[int, InnerSpec], sizes: Mapping[str, int]) -> dict[int, InnerSpec]:
    """The shardings in which the ops of functions inside read their operands, by value.

    Args:
      graph: the traced call.
      marked: the shardings of the operands. Where one is cast, transposed or reshaped, what comes of it is read in the same
        sharding, if its dimensions can have it.
      sizes: the sizes of the mesh axes.
    """
    found = dict(marked)
    for op in graph.ops:
        if op.name in REARRANGING and op.rule is not None and op.inputs[0] in found:
            at = corresponding(op.rule, op.rule.operands[0], op.rule.results[0])
            sharded = {d: axes for d, axes in enumerate(found[op.inputs[0]]) if axes != ()}
            ways = {d: math.prod(sizes[axis] for axis in axes or ()) for d, axes in sharded.items()}
            if all(d in at and at[d][1] % n == 0 for d, n in ways.items()):
                made: list[tuple[str, ...] | None] = [()] * len(graph.values[op.outputs[0]].shape)
                for d, axes in sharded.items():
                    made[at[d][0]] = axes
                found[op.outputs[0]] = tuple(made)
    return found


def operands_of_calls(entries: Sequence[InnerEntry], first: int = 0) -> list[list[int]]:
    """Positions, from `first`, of the entries that are operands of one call each: their marks follow each other."""
    found: list[list[int]] = []
    for at, entry in enumerate(entries):
        if entry.is_operand:
            follows = at and entries[at - 1].is_operand and entries[at - 1].behind == entry.number
            found[-1:] = [[*found[-1], first + at]] if follows else [*found[-1:], [first + at]]
    return found


def _sharding(eqn: Any) -> NamedSharding | None:
    """The named sharding that an equation constrains its operand to: a mark, or a sharding constraint."""
    if eqn.primitive.name == "custom_jvp_call":
        eqns = [one for jaxpr in inner(eqn) for one in jaxpr.eqns]
        found = _sharding(eqns[0]) if len(eqns) == 1 and eqns[0].primitive.name == "sharding_constraint" else None
        return found if found is not None and _is_mark(found) else None
    sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
    return sharding if isinstance(sharding, NamedSharding) else None


def _is_mark(sharding: NamedSharding) -> bool:
    return any(name.startswith((_READ, _MADE)) for name in sharding.mesh.axis_names)


def _ranks(sharding: NamedSharding, hardware: Hardware) -> tuple[int, ...] | None:
    """The device of the hardware at each position of a constraint's mesh; None if it has others, or another memory."""
    mesh = sharding.mesh
    if isinstance(mesh, AbstractMesh) or hardware.devices is None:
        return tuple(range(hardware.count))
    own = list(mesh.devices.flat)
    kind = sharding.memory_kind  # devices of which only a description is here have no default memory
    if set(own) != set(hardware.devices) or (kind is not None and kind != own[0].default_memory().kind):
        return None
    return tuple(map(list(hardware.devices).index, own))


def constrain_inner(
    function: Callable[..., Any], specs: Mapping[int, InnerSpec | None], mesh: PlanMesh,
    static_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:  # fmt: skip
    """`function` with shardings in the place of its inner entries.

    Args:
      function: the function.
      specs: shardings over the mesh axes of a plan by equation number; None names the equation in the lowered module, where
        each propagation writes a sharding of its own (`shardy.PreparedModule.propagate`).
      mesh: the mesh of the shardings.
      static_argnums: as in `jax.jit`.
    """

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        spec = specs[number]
        if spec is None:
            name = f"{INNER_AXIS}{number}"
            sharding = NamedSharding(abstract_mesh([(name, 1)]), PartitionSpec(name))
        else:
            closed = mesh.sharding(tuple(dim or () for dim in spec))
            dims = [*closed.spec, *[None] * (len(spec) - len(closed.spec))]
            free = PartitionSpec.UNCONSTRAINED
            sharding = NamedSharding(
                closed.mesh, PartitionSpec(*(free if own is None else dim for own, dim in zip(spec, dims, strict=True)))
            )
        if eqn.primitive.name == "custom_jvp_call":
            return [_constrained(inputs[0], sharding)]
        return [jax.lax.with_sharding_constraint(inputs[0], sharding)]

    return functools.wraps(function)(rebind(function, lambda eqn, number: number in specs, bind, static_argnums))

"""A call as a pure function of its values, and the constraints that are written into it before planning."""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import tree_util

from shardfn.errors import StrategyError, fail
from shardfn.frontend import nnx_objects
from shardfn.frontend.ambient_mesh import AmbientMesh, has_types, typed_closure, without_types
from shardfn.frontend.arguments import Call, signature, split
from shardfn.frontend.callee import Callee
from shardfn.frontend.closed_over import ClosedOverArguments, as_arguments
from shardfn.frontend.meshes import abstract_mesh
from shardfn.frontend.outer_call import OuterCall
from shardfn.frontend.recorder import recording
from shardfn.frontend.refs import values_of
from shardfn.frontend.static_leaves import hide_static, holds_static, restore_static
from shardfn.frontend.trace import Traced, TracedJaxpr, lower, trace_jaxpr
from shardfn.frontend.trace_errors import explained_by_arguments
from shardfn.ir.model import Axes, InnerSpec
from shardfn.movement import Shards, shifted, with_shared_halos, with_shifts
from shardfn.planning.call.first_trace import replayed
from shardfn.planning.inside import constrain_inner, constrain_tags
from shardfn.planning.layout_rules import LayoutRule
from shardfn.planning.meshes import PlanMesh
from shardfn.planning.workarounds import WrongOp, replicate_wrong_ops, separate_windows


class OtherCall(Exception):
    """Raised while tracing: the jitted function was planned for other shapes or static values."""


@dataclasses.dataclass(frozen=True, eq=False)
class CallFunction:
    """A call as a pure function of its values; `on` gives it with its constraints on a mesh."""

    pure: Callable[..., Any]
    """From `pure_function`, inside `outer`. It is made once: `jax.jit` traces a function again that is another object."""
    outer: OuterCall
    """This call, for the sharded functions that it calls."""
    callee: Callee
    call: Call
    """The call, with shapes in the place of arrays."""
    donate_argnums: tuple[int, ...]
    jaxpr: Any = None
    """The jaxpr of `pure`, as the user wrote it: a layout file's fingerprint is of it, whatever form is compiled."""
    replay: Callable[..., Any] | None = None
    """`pure` after its first trace (`first_trace.replayed`)."""
    shifted: Callable[..., Any] | None = None
    """`pure` with its static movement as shifts (`movement`), made once; None if it has none."""
    unshifted: TracedJaxpr | None = None
    """The trace of the function, where it is still open whether its movement is to be shifts: they are found if it moves along
    sharded dimensions."""
    is_as_written: bool = False
    """Whether the plan needs no shifts: nothing moves along sharded dimensions."""
    halo_shards: Shards = dataclasses.field(default_factory=dict)
    """The shards that shared halos are made for (`with_shared_halos`); none before there is a plan."""
    separates_windows: bool = False
    """Whether each window gets an array of its own (`separate_windows`)."""
    tags: Mapping[str, LayoutRule] = dataclasses.field(default_factory=dict)
    """The layout file's rules for tagged activations."""
    tag_axes: Axes = ()
    """The mesh axes of these rules."""
    inner: Mapping[int, InnerSpec | None] = dataclasses.field(default_factory=dict)
    """The shardings of values inside, by equation number; None until they are placed."""
    has_residuals: bool = False
    """Whether it is part of a derivative: the compiled program that makes its arguments computes it too."""
    wrong: tuple[WrongOp, ...] = ()
    """Ops that need a workaround for an XLA bug."""
    ambient: AmbientMesh | None = None
    """The mesh around the call, if the call uses it."""
    assumed_trips: int = 1
    """How often loops of unknown length are counted."""

    @property
    def has_shifts(self) -> bool:
        """Whether its movement is written as shifts."""
        return self.shifted is not None and not self.is_as_written

    @property
    def base(self) -> Callable[..., Any]:
        """`pure`, which runs the user's Python once where it can."""
        return self.replay or self.pure

    def replaying(self, traced: TracedJaxpr) -> CallFunction:
        """The same, for which the user's Python does not run again; `traced` is what `as_jaxpr` returned of `pure` itself."""
        if self.ambient is not None:
            return self
        return dataclasses.replace(self, replay=replayed(self.pure, traced, self.call.values, self.call.statics))

    def on(self, mesh: PlanMesh) -> Callable[..., Any]:
        """The function with its constraints written on `mesh`."""
        statics = self.call.statics
        function = self.shifted if self.shifted is not None and self.has_shifts else self.base
        if self.separates_windows:
            function = separate_windows(function, statics)
        if self.tags:
            function = constrain_tags(function, self.tags, self.tag_axes, mesh, statics)
        if self.inner:
            function = constrain_inner(function, self.inner, mesh, statics)
        if self.wrong:
            function = replicate_wrong_ops(function, mesh.mesh, self.wrong, statics)
        if self.halo_shards:
            function = with_shared_halos(function, self.halo_shards, statics)
        return function

    def as_jaxpr(self, mesh: PlanMesh | None = None) -> TracedJaxpr:
        """The trace of the function on a mesh; before there is a plan, on an abstract mesh with the axes of the tags."""
        mesh = mesh or PlanMesh.of(abstract_mesh(self.tag_axes))
        unplaced = dataclasses.replace(self, inner=dict.fromkeys(self.inner))
        with explained_by_arguments(self.call), without_types(self.ambient, self.callee.name):
            return trace_jaxpr(unplaced.on(mesh), self.call.values, self.call.statics, self.callee.function)

    def with_shifts(self, traced: TracedJaxpr) -> CallFunction:
        """The function with its static movement as shifts, if it has any; `traced` is what `as_jaxpr` returned."""
        with without_types(self.ambient, self.callee.name):
            closed = shifted(traced.stage.jaxpr)
        if closed is None:
            return dataclasses.replace(self, unshifted=None)
        function = with_shifts(self.base, self.call.statics)
        if self.ambient is None:
            function = replayed(function, traced, self.call.values, self.call.statics, closed)
        return dataclasses.replace(self, unshifted=None, shifted=function)

    def with_shared_halos(self, shards: Shards) -> CallFunction:
        """The function with its movement as shifts that share halos (`with_shared_halos`)."""
        function = self.shifted or with_shifts(self.base, self.call.statics)
        return dataclasses.replace(self, shifted=function, halo_shards=shards)

    def of(self, pure: Callable[..., Any]) -> CallFunction:
        """The same call, of another function with the same program."""
        function = None if self.shifted is None else with_shifts(pure, self.call.statics)
        return dataclasses.replace(self, pure=pure, replay=None, shifted=function)

    def lowered(self, traced: TracedJaxpr, platform: str) -> Traced:
        """What `as_jaxpr` returned, lowered for a platform."""
        with explained_by_arguments(self.call), without_types(self.ambient, self.callee.name):
            return lower(traced, platform, self.assumed_trips)

    def traced(self, platform: str, mesh: PlanMesh | None = None) -> Traced:
        """The function traced on a mesh, as in `as_jaxpr`, and lowered for a platform."""
        return self.lowered(self.as_jaxpr(mesh), platform)


def pure_function(callee: Callee, call: Call) -> Callable[..., Any]:
    """The call as a function of its values in order. It returns the changed arrays too where the call writes them back.

    Args:
      callee: what is called (`Callee.frozen`).
      call: the call, with shapes in the place of arrays (`Call.of_shapes`).

    It has the user's names, which JAX's errors, profiles and HLO show, and keeps none of the call's arrays alive.
    """
    slots, statics, stateful, expected = call.slots, call.statics, call.stateful, signature(call.values, call.statics)
    static = {name for name, value in call.arguments().items() if holds_static(value)}

    def evaluate(*flat: Any) -> Any:
        if call.closed_over is not None:
            return call.closed_over.evaluate([value for i, value in enumerate(flat) if i not in statics])
        state, rest = (flat[0], flat[1:]) if stateful else ({}, flat)
        names = (slot.name for slot in slots)
        given = {
            name: restore_static(value) if name in static else value for name, value in zip(names, rest, strict=True)
        }
        objects, given, before = callee.objects.filled(given) if callee.objects else (callee.objects, given, {})
        given, refs = callee.refs.opened(given) if callee.refs else (given, {})
        attributes = nnx_objects.attributes(objects.nodes) if objects else {}
        kept = {name: _custom_nodes(value) for name, value in given.items() if name not in objects.places}
        result, changed = callee.call(state, *split(slots, [*given.values()]))
        for name, nodes in kept.items():
            _refuse_lost_changes(name, nodes)
        if objects:
            after = nnx_objects.read(objects.nodes)
            changed |= callee.changed(before, after, attributes, nnx_objects.attributes(objects.nodes)) | {
                path: after[path] for path in before if objects.is_donated(path)
            }
        changed |= values_of(refs)
        result = hide_static(result)
        return (result, changed) if call.returns_changes else result

    if call.ambient is not None and call.ambient.explicit:
        evaluate = typed_closure(evaluate, call.ambient, statics)

    def pure(*flat: Any) -> Any:
        if signature(flat, statics) != expected or has_types(flat):
            raise OtherCall
        return evaluate(*flat)

    kind = inspect.Parameter.POSITIONAL_ONLY
    names = ["self"] * stateful + [slot.name for slot in slots]
    found = [n if n.isidentifier() and not keyword.iskeyword(n) else f"argument_{i}" for i, n in enumerate(names)]
    pure.__name__ = pure.__qualname__ = callee.name
    pure.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in found])  # type: ignore[attr-defined]
    pure.__wrapped__ = callee.function  # type: ignore[attr-defined]
    return pure


def closed_over_arguments(callee: Callee, call: Call, only_refs: bool) -> ClosedOverArguments:
    """The arrays that a function closes over in a call, or its refs only, with its trace, which takes them as arguments."""
    shapes = call.of_shapes()
    with (
        recording(callee.root, callee.name, callee.objects_of(call)) as read,
        explained_by_arguments(shapes),
        without_types(call.ambient, callee.name),
    ):
        function = pure_function(callee.frozen(shapes), shapes)
        traced = jax.jit(function, static_argnums=call.statics, keep_unused=True).trace(*shapes.values)
    return dataclasses.replace(
        as_arguments(traced, callee.function, call.stateful, call.returns_changes, only_refs), watch=read()
    )


def _custom_nodes(value: Any) -> list[tuple[Any, list[Any]]]:
    """The registered pytree objects in an argument and their leaves. Lists, tuples and dicts are no such objects, nor is
    an `nnx.State`: `nnx.merge` makes a module of its variables, whose new state the function returns."""
    nnx = sys.modules.get("flax.nnx")
    state = () if nnx is None else nnx.State

    def is_object(node: Any) -> bool:
        return not isinstance(node, list | tuple | dict | None) and not tree_util.all_leaves([node])

    nodes = tree_util.tree_leaves(value, is_leaf=is_object)
    return [(n, tree_util.tree_leaves(n)) for n in nodes if is_object(n) and not isinstance(n, state)]


def _refuse_lost_changes(name: str, before: list[tuple[Any, list[Any]]]) -> None:
    """Refuse a call that changed an object in an argument.

    Raises:
      StrategyError: the object's leaves are not those of before.
    """
    for node, leaves in before:
        after = tree_util.tree_leaves(node)
        if len(after) != len(leaves) or any(map(operator.is_not, after, leaves)):
            fail(StrategyError, f"the call changes its argument `{name}`, and the change would be lost",
                 where=f"{name}, a {type(node).__name__}", why="a compiled function works on a copy of its arguments",
                 fix=f"return the changed {type(node).__name__} as a result, or make it a Flax NNX module")  # fmt: skip

"""A call as a pure function of its values, and the constraints that are written into it before planning."""

from __future__ import annotations

import dataclasses
import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardfn.frontend.arguments import Call, signature, split
from shardfn.frontend.callee import Callee
from shardfn.ir.model import Axes
from shardfn.planning.layout_rules import LayoutRule
from shardfn.planning.plan_mesh import PlanMesh
from shardfn.planning.tags import constrain_tags
from shardfn.planning.workarounds import WrongOp, replicate_wrong_ops


class OtherCall(Exception):
    """Raised while tracing: the jitted function was planned for other shapes or static values."""


@dataclasses.dataclass(frozen=True, eq=False)
class CallFunction:
    """A call as a pure function of its values; `on` gives it with its constraints on a mesh."""

    pure: Callable[..., Any]
    shapes: Sequence[Any]
    """The values of the call, with shapes in the place of arrays."""
    static_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    tags: Mapping[str, LayoutRule] = dataclasses.field(default_factory=dict)
    """The layout file's rules for tagged activations."""
    tag_axes: Axes = ()
    """The mesh axes of these rules."""
    separates_windows: bool = False
    """Whether `pure` gives each window an array of its own (`separate_windows`)."""
    wrong: tuple[WrongOp, ...] = ()
    """Ops that need a workaround for an XLA bug."""

    def on(self, mesh: PlanMesh) -> Callable[..., Any]:
        """The function with its constraints written on `mesh`."""
        function = self.pure
        if self.tags:
            function = constrain_tags(function, self.tags, self.tag_axes, mesh.mesh, mesh.parts, self.static_argnums)
        return replicate_wrong_ops(function, mesh.mesh, self.wrong, self.static_argnums) if self.wrong else function


def pure_function(callee: Callee, call: Call) -> Callable[..., Any]:
    """The call as a function of its values in order. A stateful callee's returns its changed state too.

    It has the user's names, which JAX's errors, profiles and HLO show, and keeps none of the call's arrays alive.
    """
    shapes, statics, slots, stateful = call.shapes, call.statics, call.slots, call.stateful
    frozen = callee.frozen(shapes[0]) if stateful else callee
    expected = signature(shapes, statics)

    def pure(*flat: Any) -> Any:
        if signature(flat, statics) != expected:
            raise OtherCall
        state, rest = (flat[0], flat[1:]) if stateful else ({}, flat)
        args, kwargs = split(slots, rest)
        result, changed = frozen.call(state, args, kwargs)
        return (result, changed) if stateful else result

    kind = inspect.Parameter.POSITIONAL_ONLY
    names = ["self"] * stateful + [s.name for s in slots]
    found = [n if n.isidentifier() and not keyword.iskeyword(n) else f"argument_{i}" for i, n in enumerate(names)]
    pure.__name__ = pure.__qualname__ = callee.name
    pure.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in found])  # type: ignore[attr-defined]
    pure.__wrapped__ = callee.function  # type: ignore[attr-defined]
    return pure

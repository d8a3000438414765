"""Names for activations inside a function, and the layouts that a layout file gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from shardfn.errors import Problem, StrategyTypeError, a, fail
from shardfn.frontend.meshes import partition_spec
from shardfn.frontend.strategy import Leaf, short
from shardfn.ir.model import Axes
from shardfn.ir.rewrite import bind_one, equations, rebound
from shardfn.planning.layout_rules import MOST, LayoutFile, Rule, laid, matched, printable

PREFIX = "shardfn:"
"""Before a tag in the name that JAX keeps, so that it is no name of a checkpoint policy of the user's."""


def tag(x: Any, name: str) -> Any:
    """`x`, an array or a pytree of arrays, under a name that the `[activations]` of a layout file can speak of.

    It computes nothing, goes through every transformation, and is no more than a name where no file speaks of it.

    Raises:
      StrategyTypeError: the name is no string.

    >>> import jax.numpy as jnp
    >>> tag(jnp.float32(3), "block/0").item()
    3.0
    """
    if not isinstance(name, str) or not name:
        fail(StrategyTypeError, f"a tag is a name, not {a(name)}", where=f"tag(x, {short(name)})",
             why="the rules of a layout file find it by its name", fix='write a string: tag(x, "block/out")')  # fmt: skip
    return jax.tree_util.tree_map(lambda leaf: checkpoint_name(leaf, PREFIX + name), x)


def tags_of(
    layout: LayoutFile, jaxpr: Any, axes: Axes, devices: int, problems: list[Problem], strict: bool = True
) -> dict[str, Rule]:
    """For each tag in a program that a rule of the file meets, that rule; `problems` receives what does not fit."""
    found = list(dict.fromkeys(_leaves(jaxpr)))
    first = list({leaf.path: leaf for leaf in found}.values())
    met = matched(layout.activations, first, "activations", layout.name, problems, strict)
    counted = {rule.glob: rule for rule in met.values() if rule.cut is not None and not (layout.grid and _names(rule))}
    problems += [_no_axes(rule, layout) for rule in list(counted.values())[:MOST]]
    rules = {first[i].path: rule for i, rule in met.items() if rule.glob not in counted}
    for leaf in found:
        if leaf.path in rules:
            laid(rules[leaf.path], leaf, axes, devices, f"{layout.name}: [activations]", problems)
    return rules


def _names(rule: Rule) -> bool:
    """Whether a rule can be held on the grid of a file: it names axes, or leaves dims whole."""
    return not any(isinstance(dim, int) and dim > 1 for dim in rule.cut or ())


def _no_axes(rule: Rule, layout: LayoutFile) -> Problem:
    what = "is for an activation, and there is no [grid]" if _names(rule) else "counts pieces of an activation"
    return Problem(
        f"a rule of {layout.name} {what}: `{printable(rule.glob)}`",
        where=f"{layout.name}: [activations] {rule.glob!r} = {list(rule.cut or ())}",
        why="an activation is held over named axes; those that pieces of arguments come to lie on are not known before",
        fix='write [grid] and a line for each axis, a = "left", and name axes in all rules: ["a", 1]',
    )


def _leaves(jaxpr: Any) -> Iterator[Leaf]:
    for _, eqn, is_reached in equations(jaxpr):
        if is_reached and (name := _tag(eqn)) is not None:
            aval = eqn.outvars[0].aval
            yield Leaf(name, f"the activation `{name}`", tuple(aval.shape), str(aval.dtype))


def _tag(eqn: Any) -> str | None:
    name = eqn.params.get("name") if eqn.primitive.name == "name" else None
    return name.removeprefix(PREFIX) if isinstance(name, str) and name.startswith(PREFIX) else None


def held_tags(
    function: Callable[..., Any], rules: Mapping[str, Rule], axes: Axes, mesh: Any, parts: Mapping[str, tuple[str, ...]],
    static_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:  # fmt: skip
    """`function` with what is tagged held to the layouts of the rules.

    Args:
      rules: by tag, as `tags_of` gives them.
      axes: the grid that the rules speak of.
      mesh: the mesh to name layouts on.
      parts: for each axis of the grid the axes of `mesh` that make it up.
      static_argnums: as in `jax.jit`.
    """
    devices = mesh.size

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        (out,) = bind_one(eqn, inputs)
        spec = laid(rules[_tag(eqn) or ""], Leaf("", "", tuple(out.shape), ""), axes, devices, "", [])
        if not isinstance(spec, tuple) or all(isinstance(dim, int) for dim in spec):
            return [out]
        fine = tuple(tuple(part for axis in dim for part in parts[axis]) for dim in spec)
        return [jax.lax.with_sharding_constraint(out, NamedSharding(mesh, partition_spec(fine)))]

    return functools.wraps(function)(rebound(function, lambda eqn, number: _tag(eqn) in rules, bind, static_argnums))

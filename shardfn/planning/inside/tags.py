"""Tags: names of values inside a function, and the shardings that a layout file gives them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardfn.errors import Problem, StrategyTypeError, a, fail
from shardfn.frontend.strategy import Leaf, short
from shardfn.ir.model import Axes
from shardfn.ir.rewrite import bind_one, equations, rebind
from shardfn.planning.layout_rules import MAX_REPORTED, LayoutFile, LayoutRule, match_rules, printable, rule_entry
from shardfn.planning.meshes import PlanMesh

PREFIX = "shardfn:"
"""Begins the name that JAX keeps for a tag, so that no user's checkpoint policy matches it."""


def tag(x: Any, name: str) -> Any:
    """Name a value, for rules in the `[activations]` section of a layout file.

    A tag computes nothing and goes through every JAX transformation.

    Args:
      x: an array or a pytree of arrays.
      name: the name that the rules match, such as "block/out".

    Returns:
      `x`, unchanged.

    Raises:
      StrategyTypeError: `name` is not a string, or empty.

    >>> import jax.numpy as jnp
    >>> tag(jnp.float32(3), "block/0").item()
    3.0
    """
    if not isinstance(name, str) or not name:
        fail(StrategyTypeError, f"a tag is a name, not {a(name)}", where=f"tag(x, {short(name)})",
             why="the rules of a layout file match it by its name", fix='write a string: tag(x, "block/out")')  # fmt: skip
    return jax.tree_util.tree_map(lambda leaf: checkpoint_name(leaf, PREFIX + name), x)


def match_tags(
    layout: LayoutFile, jaxpr: Any, axes: Axes, devices: int, problems: list[Problem]
) -> dict[str, LayoutRule]:
    """The rule of each tag in a program that one matches; `problems` receives what does not fit."""
    found = list(dict.fromkeys(_leaves(jaxpr)))
    first = list({leaf.path: leaf for leaf in found}.values())
    matched = match_rules(layout, "activations", first, problems)
    bare = {r.glob: r for r in matched.values() if r.sharding is not None and (r.has_counts or not layout.mesh)}
    problems += [_without_axes(rule, layout) for rule in list(bare.values())[:MAX_REPORTED]]
    rules = {first[i].path: rule for i, rule in matched.items() if rule.glob not in bare}
    for leaf in found:
        if leaf.path in rules:
            rule = rules[leaf.path]
            rule_entry(rule, leaf, axes, devices, rule.where(layout.name, "activations"), problems)
    return rules


def _without_axes(rule: LayoutRule, layout: LayoutFile) -> Problem:
    counts, bare = "gives numbers of shards for an activation", "is for an activation, and there is no [mesh]"
    return Problem(f"a rule of {layout.name} {counts if rule.has_counts else bare}: `{printable(rule.glob)}`",
                   f"{rule.where(layout.name, 'activations')} = {list(rule.sharding or ())}",
                   "an activation is sharded over named mesh axes; the axes that numbers of shards stand for are chosen later",
                   'write [mesh] and a line for each axis, a = "left", and name axes in all rules: ["a", 1]')  # fmt: skip


def _leaves(jaxpr: Any) -> Iterator[Leaf]:
    for _, eqn, is_reached in equations(jaxpr):
        if is_reached and (name := _tag(eqn)) is not None:
            aval = eqn.outvars[0].aval
            yield Leaf(name, f"the activation `{name}`", tuple(aval.shape), str(aval.dtype))


def _tag(eqn: Any) -> str | None:
    name = eqn.params.get("name") if eqn.primitive.name == "name" else None
    return name.removeprefix(PREFIX) if isinstance(name, str) and name.startswith(PREFIX) else None


def constrain_tags(
    function: Callable[..., Any], rules: Mapping[str, LayoutRule], axes: Axes, mesh: PlanMesh,
    static_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:  # fmt: skip
    """`function` with a sharding constraint on each tagged value.

    Args:
      function: the function.
      rules: the rule of each tag, from `match_tags`.
      axes: the mesh axes that the rules name.
      mesh: the mesh of the constraints.
      static_argnums: as in `jax.jit`.
    """

    def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
        (out,) = bind_one(eqn, inputs)
        spec = rule_entry(rules[_tag(eqn) or ""], Leaf("", "", tuple(out.shape), ""), axes, mesh.mesh.size, "", [])
        if not isinstance(spec, tuple) or all(isinstance(dim, int) for dim in spec):
            return [out]
        return [jax.lax.with_sharding_constraint(out, mesh.sharding(spec))]

    return functools.wraps(function)(rebind(function, lambda eqn, number: _tag(eqn) in rules, bind, static_argnums))

"""The arrays at both ends of a call, each with what the user said of it: arguments, results, changed state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax import tree_util

from shardfn.errors import Problem, warn
from shardfn.frontend.arguments import Call
from shardfn.frontend.callee import Callee
from shardfn.frontend.defaults import Defaults
from shardfn.frontend.meshes import partition_spec
from shardfn.frontend.options import Options
from shardfn.frontend.parameter_plan import apply_parameter_plan
from shardfn.frontend.strategy import (
    AUTO,
    UNKNOWN,
    Argument,
    Leaf,
    ModeEntry,
    leaves_of,
    match,
    shape_of,
)
from shardfn.frontend.validation import check, check_all
from shardfn.ir.model import Spec


def input_leaves(
    callee: Callee, options: Options, call: Call, current: Defaults, problems: list[Problem]
) -> list[Leaf]:
    """The leaves of the state and of the dynamic arguments, in their order; `problems` grows."""
    strategy = options.in_strategy
    positional: list[Argument] = []
    declared: list[int] = []
    late: list[Argument] = []
    for slot, value in zip(call.slots, call.values[call.stateful :], strict=True):
        if slot.is_static:
            continue
        if slot.declared is None:
            late.append(Argument(slot.name, f"argument `{slot.name}`", value))
        else:
            positional.append(Argument(slot.name, f"argument {len(positional)} `{slot.name}`", value))
            declared.append(slot.declared)
    name = "in_strategy"
    if strategy is None and isinstance(current.dataset_strategy, tuple):
        name = "dataset_strategy"
        strategy = (*current.dataset_strategy, *[AUTO] * (len(positional) - len(current.dataset_strategy)))
    if type(strategy) is tuple and len(strategy) != len(positional):
        strategy = _with_defaults(strategy, callee, options, declared)
    leaves = []
    if call.stateful:
        names = {argument.name for argument in (*positional, *late)}
        for path, value in sorted(call.values[0].items()):
            # An attribute that has the name of an argument is called as in the class.
            path = f"self/{path}" if path.partition("/")[0] in names else path
            leaves.append(Leaf(path, f"`{path}` of {callee.name}", *(shape_of(value) or ((), UNKNOWN))))
    leaves += match(positional, strategy, name, problems, late)
    for argument in late:
        leaves += leaves_of(argument, problems)
    return apply_parameter_plan(leaves, options.parameter_plan, problems)


def with_types(leaves: Sequence[Leaf], types: Sequence[Spec | None]) -> list[Leaf]:
    """The leaves that have no entry with the Explicit axes of their types as entries."""
    rows = zip(leaves, types or (None,) * len(leaves), strict=True)
    return [
        leaf if spec is None or leaf.where or leaf.entry is not AUTO
        else dataclasses.replace(leaf, entry=partition_spec(spec), where=f"jax.typeof({leaf.path})")
        for leaf, spec in rows
    ]  # fmt: skip


def output_leaves(
    callee: Callee, options: Options, result: Any, current: Defaults, devices: int, problems: list[Problem]
) -> list[Leaf]:
    """The leaves of the result, with the entries of `out_strategy`, or what the context puts in their place."""
    said = _matched(result, options.out_strategy, problems)
    if options.out_strategy is None or current.honours_out_strategy:
        return said
    check_all(said, devices, problems)
    if problems:
        return _matched(result, None, [])
    is_replicated = current.dataset_strategy == "full_batch"
    found = _matched(result, _instead(result, is_replicated, f"parallel_mode={current.parallel_mode!r}"), [])
    if all(check(one, devices, []) == check(other, devices, []) for one, other in zip(said, found, strict=True)):
        return said
    warn(
        f"out_strategy of `{callee.name}` is overridden with {'replicated results' if is_replicated else 'data parallel'}, "
        f"as MindSpore does under parallel_mode={current.parallel_mode!r}; to honour it: "
        'set_auto_parallel_context(out_strategy_mode="honour")'
    )
    return found


def changed_leaves(changed: Mapping[str, Any]) -> list[Leaf]:
    """The leaves of the state that a call changes, which are results too."""
    return [
        Leaf(f"state/{path}", f"`{path}`", tuple(value.shape), str(value.dtype))
        for path, value in sorted(changed.items())
    ]


def replacements(result: Any, arguments: Sequence[Any]) -> dict[int, int]:
    """Leaf by leaf, the results that can take an argument's place in the next call: parameters, optimizer state.

    That is a part of the result, at any depth, of several arrays with the structure, shapes and dtypes of an argument.

    >>> import jax
    >>> one = {"w": jax.ShapeDtypeStruct((2,), "int32"), "b": jax.ShapeDtypeStruct((), "int32")}
    >>> replacements({"loss": one["b"], "params": one}, [one])
    {1: 0, 2: 1}
    """

    def form(tree: Any) -> Any:
        leaves, treedef = tree_util.tree_flatten(tree)
        return treedef, [shape_of(leaf) for leaf in leaves]

    starts, position = [], 0
    for argument in arguments:
        starts.append((form(argument), position))
        position += len(tree_util.tree_leaves(argument))
    found: dict[int, int] = {}

    def meet(part: Any, position: int) -> None:
        """Record the arguments that this part of the result, or parts of it, can replace."""
        mine = form(part)
        size = len(mine[1])
        match_ = next((s for s in starts if size > 1 and s[0] == mine), None)
        if match_ is not None:
            starts.remove(match_)
            found.update({position + i: match_[1] + i for i in range(size)})
        elif size > 1:
            for child in tree_util.tree_leaves(part, is_leaf=lambda tree: tree is not part):
                meet(child, position)
                position += len(tree_util.tree_leaves(child))

    meet(result, 0)
    return found


def _with_defaults(strategy: tuple[Any, ...], callee: Callee, options: Options, declared: list[int]) -> Any:
    """Entries of the arguments that were passed. Arguments with defaults may be left out of the call or the strategy."""
    if callee.signature is None:
        return strategy
    every = {
        i: p.default is not p.empty
        for i, p in enumerate(callee.signature.parameters.values())
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and i not in options.static_argnums
        and p.name not in options.static_argnames
    }
    required = [i for i, has_default in every.items() if not has_default]
    if not len(required) <= len(strategy) <= len(every) or any(i not in every for i in declared):
        return strategy
    entries = dict(zip(every, strategy, strict=False))
    return tuple(entries.get(i, AUTO) for i in declared)


def _outer(result: Any) -> tuple[Any, ...]:
    """The results that an out_strategy has entries for: a tuple's elements, or the one result."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _matched(result: Any, strategy: Any, problems: list[Problem]) -> list[Leaf]:
    single = not isinstance(result, tuple | list)
    arguments = [
        Argument("result" if single else f"result/{i}", "the output" if single else f"output {i}", value)
        for i, value in enumerate(_outer(result))
    ]
    return match(arguments, strategy, "out_strategy", problems)


def _instead(result: Any, is_replicated: bool, mode: str) -> Any:
    """The replacement of an out_strategy under MindSpore's rule: data parallel, or replicated under full_batch."""
    return tuple(
        tree_util.tree_map(lambda s: ModeEntry((1,) * len(s.shape) if is_replicated else None, mode), e)
        for e in _outer(result)
    )

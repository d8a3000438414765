"""What a call has otherwise than the one that was planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax import tree_util

from shardfn.errors import a
from shardfn.frontend.arguments import Call, is_weak
from shardfn.frontend.paths import array_paths, few
from shardfn.frontend.plain_objects import exactly
from shardfn.frontend.strategy import shape_of, short

MOST = 4
"""So many differences are told."""


def differences(planned: Call, given: Sequence[Any]) -> str:
    """What of the values of a call differs from those of the planned one (`arguments.signature`), each by its argument."""
    return few([*_differences(planned, given)], MOST)


def arguments_text(call: Call) -> str:
    """The arguments of a call, each array by its path, the first of many."""
    static = {slot.name for slot in call.slots if slot.is_static}
    texts: list[str] = []
    for name, value in call.arguments().items():
        if name in static:
            texts.append(f"{name} = {short(value)}")
        else:
            pairs = zip(array_paths(name, value), tree_util.tree_leaves(value), strict=True)
            texts += [f"{path}: {_text(leaf)}" for path, leaf in pairs]
    return few(texts, MOST)


def _differences(planned: Call, given: Sequence[Any]) -> Iterator[str]:
    names = ["arrays"] * planned.stateful + [slot.name for slot in planned.slots]
    if len(given) != len(names):
        yield f"{len(given)} given, planned: {len(names)} ({', '.join(names)})"
        return
    for i, (name, value, before) in enumerate(zip(names, given, planned.values, strict=True)):
        if i not in planned.statics:
            yield from _of_trees(name, value, before)
        elif exactly(value) != exactly(before):
            yield f"{name} = {short(value)}, planned: {short(before)}"


def _of_trees(name: str, value: Any, before: Any) -> Iterator[str]:
    mine, planned = (dict(zip(array_paths(name, t), tree_util.tree_leaves(t), strict=True)) for t in (value, before))
    for path in {**planned, **mine}:
        if path not in mine or path not in planned:
            yield f"{path} is missing" if path in planned else f"{path} is new"
        elif (text := _text(mine[path])) != (was := _text(planned[path])):
            yield f"{path}: {text}, planned: {was}"
    if mine.keys() == planned.keys() and tree_util.tree_structure(value) != tree_util.tree_structure(before):
        yield f"{name} is {a(value)} of another structure than was planned"


def _text(leaf: Any) -> str:
    found = shape_of(leaf)
    if found is None:
        return a(leaf)
    return f"{found[1]}[{','.join(map(str, found[0]))}]" + (", weakly typed" if is_weak(leaf) else "")

"""Stage marks: which stage a user gives a function, a module or a parameter path."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import tree_util

from shardfn.errors import Problem
from shardfn.frontend.paths import listed, met, normal
from shardfn.frontend.strategy import is_cell, short
from shardfn.train.pipelines.trace_loss import MARK

Mark = tuple[int, int]
"""A stage, and a segment: which of the chunks that the stage's devices hold."""


def staged(function: Callable[..., Any], stage: int, segment: int = 0) -> Callable[..., Any]:
    """Assign the ops of a function to a pipeline stage, wherever a loss calls it.

    Args:
      function: a part of the model, a function of arrays.
      stage: counted from 0. Unmarked ops after the function belong to the same stage.
      segment: with `interleave`, which of the chunks on the stage's devices, counted from 0.

    Returns:
      A function that computes the same.

    >>> import jax.numpy as jnp
    >>> loss = lambda params, x: jnp.mean(staged(jnp.dot, 1)(staged(jnp.sin, 0)(x), params))
    >>> loss(jnp.ones(2), jnp.zeros((4, 2))).item()
    0.0
    """

    def marked(*args: Any) -> Any:
        return function(*args)

    functools.update_wrapper(marked, function, assigned=("__doc__",), updated=())
    marked.__name__ = marked.__qualname__ = f"{MARK}{stage}_{segment}"
    return jax.jit(marked)


def module_marks(model: Any, arrays: Any) -> list[Mark | None]:
    """For each array of a model the `pipeline_stage` and `pipeline_segment` of the innermost module that has them.

    Args:
      model: a pytree, whose nodes may be modules.
      arrays: the same with None for every leaf that is no array.

    >>> module_marks({"a": 1.0}, {"a": 1.0})
    [None]
    """
    keyed = tree_util.tree_flatten_with_path(arrays)[0]
    return [_innermost(model, key, _child) for key, _ in keyed]


def cell_marks(cell: Any, paths: Sequence[str]) -> list[Mark | None]:
    """The same for a `Cell`, whose parameters have paths such as `block1.weight`."""
    return [_innermost(cell, path.replace("/", ".").split("."), _named_child) for path in paths]


def with_config(
    paths: Sequence[str], stages: Mapping[str, int], segments: Mapping[str, int], found: Sequence[Mark | None]
) -> tuple[list[Mark | None], list[Problem]]:
    """The marks with those from `stage_config` and `segment_config`, and a problem for each glob without a match."""
    marks = list(found)
    full = [normal(path) for path in paths]
    problems = []
    for name, config, place in (("stage_config", stages, 0), ("segment_config", segments, 1)):
        for glob, number in config.items():
            hits = sorted({*met(glob, full)[0], *met(f"{glob}/*", full)[0]})  # a module's path means its parameters
            if not hits:
                problems.append(Problem(f"{name} {glob!r} matches no parameter", f"{name} = {short(dict(config))}",
                                        f"the parameters are {listed(paths)}",
                                        "use a path, the path of a module, or a glob of paths"))  # fmt: skip
            for i in hits:
                stage, segment = marks[i] or (0, 0)
                marks[i] = (stage, number) if place else (number, segment)
    return marks, problems


def _innermost(value: Any, keys: Sequence[Any], child: Callable[[Any, Any], Any]) -> Mark | None:
    """The mark of the innermost value that has one, on the way along the keys to an array."""
    marks = [_own_mark(value)]
    for number, key in enumerate(keys, 1):
        if is_cell(value) and isinstance(key, tree_util.DictKey):  # a Cell in a model, whose arrays are by path
            (mark,) = cell_marks(value, [str(key.key)])
            marks.append(mark)
            break
        if number == len(keys):  # the array has no mark
            break
        try:
            value = child(value, key)
        except (AttributeError, KeyError, IndexError, TypeError):
            break
        marks.append(_own_mark(value))
    return next(filter(None, reversed(marks)), None)


def _own_mark(value: Any) -> Mark | None:
    stage, segment = getattr(value, "pipeline_stage", None), getattr(value, "pipeline_segment", 0)
    if not isinstance(stage, int) or isinstance(stage, bool):
        return None
    return stage, segment if isinstance(segment, int) else 0


def _child(value: Any, key: Any) -> Any:
    if isinstance(key, tree_util.GetAttrKey):
        return getattr(value, key.name)
    name = key.idx if isinstance(key, tree_util.SequenceKey) else key.key
    is_attribute = isinstance(key, tree_util.DictKey) and not isinstance(value, Mapping)
    return getattr(value, str(name)) if is_attribute else value[name]


def _named_child(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value[name]
    return value[int(name)] if isinstance(value, Sequence) else getattr(value, name)

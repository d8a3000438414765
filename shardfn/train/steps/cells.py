"""Training a model with Cells: in its pytree of arrays a flat dict by path stands for each `Cell`.

A Cell that is a pytree itself, such as one that is an NNX module too, is treated as that.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from jax import tree_util

from shardfn.errors import Problem, StrategyError, StrategyTypeError, a, fail
from shardfn.frontend.left_objects import tracers_in
from shardfn.frontend.plain_objects import arrays_of_cells, attributes_of, cells_with_arrays, inner_objects
from shardfn.frontend.strategy import is_cell


def loss_of(loss_fn: Any) -> Any:
    """A loss function of a model and a batch; for a `Cell` that computes the loss itself, a call of the model."""
    if not is_cell(loss_fn):
        return loss_fn

    kind = type(loss_fn)

    def loss(cell: Any, *batch: Any) -> Any:
        if not isinstance(cell, kind):
            fail(StrategyTypeError, f"the model is {a(cell)}, and the loss is the Cell {kind.__name__}",
                 where="init(model, *batch)",
                 why="a Cell that computes the loss is the model itself: a step calls it with the batch",
                 fix=f"call init({kind.__name__}(...), *batch) with that cell; before a state from elsewhere too")  # fmt: skip
        return cell(*batch)

    loss.__name__ = kind.__name__
    first = inspect.Parameter("cell", inspect.Parameter.POSITIONAL_ONLY)
    rest = inspect.signature(kind.__call__).parameters.values()
    loss.__signature__ = inspect.Signature([first, *list(rest)[1:]])  # type: ignore[attr-defined]
    return loss


def of_unseen_model(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function for a state that no `init` of this step has made: where the state was a Cell, it holds a dict instead."""

    @functools.wraps(loss_fn)
    def loss(model: Any, *batch: Any) -> Any:
        try:
            return loss_fn(model, *batch)
        except (TypeError, AttributeError) as error:
            if not isinstance(model, dict) or "'dict' object" not in str(error):
                raise
            fail(StrategyTypeError, "this step has not seen the model that the state is of", where="state.params",
                 why=f"a state holds the arrays of a Cell in a dict, and with that the loss fails: {error}",
                 fix="call init(model) once before")  # fmt: skip

    return loss


def holds_cell(model: Any) -> bool:
    """Whether a leaf of a model is a `Cell`."""
    return any(map(is_cell, tree_util.tree_leaves(model)))


def arrays_of(model: Any, is_leaf: Callable[[Any], bool] = lambda value: False) -> Any:
    """A model with the arrays of each Cell, by path, in its place; a Cell that stands at several places is met at the first.

    Args:
      model: a pytree.
      is_leaf: which objects in a Cell stand for the array that they hold.
    """
    leaves, treedef = tree_util.tree_flatten(model)
    return treedef.unflatten(arrays_of_cells(leaves, is_leaf))


def with_arrays(model: Any, arrays: Any) -> Any:
    """The inverse of `arrays_of`: copies of the Cells of `model`, with other arrays."""
    leaves, treedef = tree_util.tree_flatten(model)
    return treedef.unflatten(cells_with_arrays(leaves, treedef.flatten_up_to(arrays)))


def refuse_lost_arrays(model: Any) -> None:
    """Refuse a model, made while it was traced, with arrays in plain objects inside its Cells: they are no parameters.

    Raises:
      StrategyError: there are such arrays.
    """
    for cell in filter(is_cell, tree_util.tree_leaves(model)):
        for inner in inner_objects(cell):
            lost = [name for name, value in attributes_of(inner).items() if tracers_in([value])]
            if lost:
                kind = type(inner).__name__
                fail(StrategyError, f"{kind}.{lost[0]} is an array of an object inside {type(cell).__name__} that is no Cell",
                     where=", ".join(f"{kind}.{name}" for name in lost),
                     why="a model is made on the devices, and of a plain object in it only the Cells inside are parameters",
                     fix=f"make {kind} a `Cell`; or, for a constant, pass the model itself: init(model, *batch)")  # fmt: skip


def hidden_cells(model: Any) -> Iterator[Problem]:
    """The Cells in attributes of Flax NNX objects: these take what is no data as part of the structure."""
    nnx = sys.modules.get("flax.nnx")
    nodes = [] if nnx is None else [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Pytree)]
    seen = set(map(id, tree_util.tree_leaves(model)))
    for node in nodes:
        for name, value in vars(node).items():
            if is_cell(value) and id(value) not in seen and tree_util.all_leaves([value]):
                kind = type(value).__name__
                yield Problem(f"`{name}` of {type(node).__name__} is a Cell, and would not be trained",
                              f"{type(node).__name__}.{name}: {kind}", "Flax NNX takes it as static, and its arrays as constants",
                              f"assign it as data: self.{name} = nnx.data({kind}(...))")  # fmt: skip

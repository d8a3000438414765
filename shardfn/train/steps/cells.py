"""Training a `Cell`: its arrays are the parameters, a flat dict by path, and the loss gets a copy of the cell that holds them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from shardfn.frontend.callee import describe, is_cell


def loss_of(loss_fn: Any) -> Any:
    """A loss function of a model and a batch; for a `Cell` that computes the loss itself, a call of the model."""
    if not is_cell(loss_fn):
        return loss_fn

    def loss(cell: Any, *batch: Any) -> Any:
        return cell(*batch)

    loss.__name__ = type(loss_fn).__name__
    first = inspect.Parameter("cell", inspect.Parameter.POSITIONAL_ONLY)
    rest = inspect.signature(type(loss_fn).__call__).parameters.values()
    loss.__signature__ = inspect.Signature([first, *list(rest)[1:]])  # type: ignore[attr-defined]
    return loss


def arrays_of(cell: Any) -> dict[str, Any]:
    """The arrays of a cell by path."""
    return dict(describe(cell).read())


def with_arrays(cell: Any, arrays: Any) -> Any:
    """A copy of a cell with other arrays."""
    adapter = describe(cell).adapter
    assert adapter is not None
    return adapter.rebuild(cell, arrays)


def on_arrays(loss_fn: Callable[..., Any], cell: Any) -> Callable[..., Any]:
    """The loss as a function of the arrays of a cell."""

    @functools.wraps(loss_fn)
    def loss(arrays: Any, *batch: Any) -> Any:
        return loss_fn(with_arrays(cell, arrays), *batch)

    return loss

"""A sharded function of a Flax NNX or an Equinox module, or of a method of one: a pytree that holds the module.

So a module that holds a sharded function of another of its modules has the arrays of both: `jax.tree.map`, `nnx.split`,
`nnx.grad` and optimizers reach them, and give a sharded function of the new module.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

from jax import tree_util

from shardfn.frontend import nnx_objects
from shardfn.frontend.options import Options
from shardfn.frontend.strategy import is_cell
from shardfn.frontend.wrapped import Layers, unwrapped, wrapped
from shardfn.runtime.entries import Entries
from shardfn.runtime.sharded_function import ShardedFunction


class ShardedModule(ShardedFunction[..., Any]):
    """A `ShardedFunction` whose function belongs to a module that is a pytree."""


@dataclasses.dataclass(frozen=True)
class _Rest:
    """All of a `ShardedModule` but its module."""

    layers: Layers
    options: Options
    entries: Entries[Any] = dataclasses.field(compare=False)

    def __hash__(self) -> int:
        return hash(self.layers)

    def __deepcopy__(self, memo: Any) -> _Rest:
        return self

    def __reduce__(self) -> Any:
        return _Rest, (self.layers, self.options, Entries())


def _is_of_module(fn: Any) -> bool:
    owner, _ = unwrapped(fn)
    if nnx_objects.is_module(owner):
        nnx = sys.modules["flax.nnx"]
        if hasattr(nnx, "register_data_type") and not nnx.is_data(object.__new__(ShardedModule)):
            nnx.register_data_type(ShardedModule)
        return True
    return callable(owner) and not is_cell(owner) and not tree_util.all_leaves([owner])


def _flatten(value: ShardedModule) -> tuple[tuple[tuple[Any, Any], ...], _Rest]:
    if (held := vars(value).get("_held")) is not None:
        owner, rest = held
    else:
        owner, layers = unwrapped(value.fn)
        rest = _Rest(layers, value.options, value._calls.entries)
    return ((tree_util.GetAttrKey("fn"), owner),), rest


def _unflatten(rest: _Rest, children: Iterable[Any]) -> Any:
    (owner,) = children
    if callable(owner):
        made: Any = ShardedModule(wrapped(owner, rest.layers), rest.options)
        made._calls.entries = rest.entries
    else:  # JAX puts other objects in the place of a module, to look at the structure
        made = object.__new__(ShardedModule)
        vars(made)["_held"] = owner, rest
    return made


tree_util.register_pytree_with_keys(ShardedModule, _flatten, _unflatten)
ShardedFunction.of_module = _is_of_module, ShardedModule

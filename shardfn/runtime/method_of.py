"""A sharded method of one object, as it is kept outside of the object (`runtime.shared_entries`)."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

from shardfn.runtime.planned_calls import PlannedCalls


class MethodOf:
    """A sharded method of one object, without the object, which may go before it.

    Args:
      sharded: the `ShardedFunction`, bound to the object.
    """

    def __init__(self, sharded: Any):
        own = "fn", "__wrapped__", "callee", "_calls"
        self._kind = type(sharded)
        self._attributes = {name: value for name, value in vars(sharded).items() if name not in own}
        self._callee = dataclasses.replace(sharded.callee, owner=None)
        self._kept = sharded._calls.kept

    def bound_to(self, method: types.MethodType) -> Any:
        """The `ShardedFunction`, bound to its object again."""
        found = object.__new__(self._kind)
        callee = dataclasses.replace(self._callee, owner=method.__self__)
        calls = PlannedCalls(callee, self._attributes["options"], self._kept)
        vars(found).update(self._attributes, fn=method, __wrapped__=method, callee=callee, _calls=calls)
        return found

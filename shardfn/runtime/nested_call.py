"""A call of a sharded function inside a transformation of JAX: on tracers."""

from __future__ import annotations

from typing import Any

import jax

from shardfn.errors import StrategyError, fail
from shardfn.frontend.arguments import Call
from shardfn.frontend.jax_errors import JaxError
from shardfn.runtime.executable import Entry, compile_entry
from shardfn.runtime.processes import refuse_numpy


def run_nested(name: str, entry: Entry, call: Call, leaves: list[Any], treedef: Any) -> Any:
    """The result of a call inside a transformation.

    Raises:
      StrategyError: an array cannot be transferred inside the transformation.
    """
    failed = None
    try:
        return entry.nested(*call.values)
    except jax.errors.JaxRuntimeError as error:  # an eager derivative compiles the plan, maybe for the first time
        failed = error
    except ValueError as error:
        # An eager derivative carries concrete arrays, which may be committed to another layout.
        if JaxError.NUMPY_INPUT.match(error):
            refuse_numpy(name)
        if not JaxError.COMMITTED_ELSEWHERE.match(error):
            raise
    except Exception as error:  # JAX's DuplicateSpecError has no public name
        duplicate = JaxError.DUPLICATE_AXIS.match(error)
        if duplicate is None:
            raise
        fail(StrategyError, f"`{name}` is mapped along a dimension that is sharded over an axis of its plan",
             where=duplicate["what"], why="the type of an array has each Explicit axis once",
             fix="shard what is mapped, shard(jax.vmap(f)); or give strategies that leave that axis out")  # fmt: skip
    if failed is not None:
        other = compile_entry(entry, lambda e: e.shapes(call))
        if other.jitted is entry.jitted:  # the plan itself compiles
            raise failed
        return other.nested(*call.values)
    try:
        put = [jax.device_put(leaf, target) for leaf, target in zip(leaves, entry.targets, strict=True)]
    except ValueError as error:  # a batched one has another shape than its tracer tells
        fail(StrategyError, f"an array in a transformation of `{name}` is committed to another layout",
             why=str(error).split("\n")[0],
             fix="leave it uncommitted, or move it with jax.device_put before the transformation")  # fmt: skip
    return entry.nested(*call.replaced(treedef, put))

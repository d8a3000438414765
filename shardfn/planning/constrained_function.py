"""A function with the constraints of its plan written into it, for a user's own `jax.jit`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import tree_util

from shardfn.planning.call_function import CallFunction
from shardfn.planning.op_constraints import apply_constraints
from shardfn.planning.plan import Plan
from shardfn.planning.plan_mesh import own_mesh
from shardfn.planning.workarounds import separate_windows


def constrained(plan: Plan, fn: Callable[..., Any], planned: CallFunction) -> Callable[..., Any]:
    """`fn` with the sharding constraints of a plan, and the workarounds of the function that was planned."""
    mesh = own_mesh(plan)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_util.tree_flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

        def pure(*arrays: Any) -> Any:
            rest = iter(arrays)
            every = [next(rest) if own else leaf for own, leaf in zip(is_array, leaves, strict=True)]
            own_args, own_kwargs = tree_util.tree_unflatten(structure, every)
            return fn(*own_args, **own_kwargs)

        function = dataclasses.replace(
            planned, pure=separate_windows(pure) if planned.separates_windows else pure, static_argnums=()
        ).on(mesh)
        if plan.constraints:
            function = apply_constraints(function, plan.constraints, mesh.mesh, mesh.parts)
        return function(*(leaf for own, leaf in zip(is_array, leaves, strict=True) if own))

    return run

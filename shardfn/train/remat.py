"""Rematerialisation: the backward pass recomputes a function's intermediate values instead of keeping them.

Flags say which collectives run again. A collective is an op of the function (`lax.psum` and others, inside
`jax.shard_map`), or the plan of the function for given shardings shows where XLA's partitioner inserts one. Its result
gets a name, and `jax.checkpoint` keeps the values of that name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax, tree_util
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.api import shard
from shardfn.errors import Problem, StrategyError, a, fail, raise_problems
from shardfn.frontend.callee import Callee, describe, is_function
from shardfn.frontend.paths import met, unmet
from shardfn.frontend.plain_objects import alike
from shardfn.frontend.strategy import shape_of, short
from shardfn.frontend.value_checks import boolean, option_problems
from shardfn.ir.rewrite import bind_one, equations, inner, rebind
from shardfn.planning.inside import anchors

COMMUNICATED = "shardfn.communicated"
"""The name of a collective's result."""
PARAMETER = "shardfn.parameter"
"""The name of a parameter that was gathered from its shards."""
INPUT = "shardfn.input"
"""The name of an activation that enters a recomputed function."""

JAXPR_COLLECTIVES = frozenset({
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced",
    "reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter", "all_to_all", "ppermute", "pgather",
})  # fmt: skip
_GATHERS = frozenset({"all_gather", "all_gather_invariant", "all_gather_reduced"})
_COPIES = frozenset({
    "convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "pvary", "pcast", "copy_p",
})  # fmt: skip
"""Ops that may stand between a parameter and its gather."""


@dataclasses.dataclass(frozen=True)
class RematOptions:
    """The options of `recompute`."""

    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool = False
    recompute_slice_activation: bool = False
    offload: bool = False
    in_strategy: Any = None
    parameter_plan: Any = None
    device: Any = None

    @property
    def policy(self) -> Callable[..., Any]:
        """Which named values `jax.checkpoint` keeps, and where."""
        kept = [] if self.mp_comm_recompute else [COMMUNICATED]
        kept += [] if self.parallel_optimizer_comm_recompute else [PARAMETER]
        if self.offload:
            return jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=kept, names_which_can_be_offloaded=[INPUT],
                offload_src="device", offload_dst="pinned_host",
            )  # fmt: skip
        return jax.checkpoint_policies.save_only_these_names(*kept)


def keep_but_parameters(primitive: Any, *_: Any, **params: Any) -> bool:
    """The policy for `jax.checkpoint` that keeps all values but gathered parameters and copies."""
    is_copy = primitive.name in _COPIES or primitive.name in ("split", "slice", "sharding_constraint")
    return not (is_copy or primitive.name in _GATHERS or params.get("name") == PARAMETER)


def recompute(
    fn: Any,
    *,
    mode: bool = True,
    mp_comm_recompute: bool = True,
    parallel_optimizer_comm_recompute: bool = False,
    recompute_slice_activation: bool = False,
    offload: bool = False,
    paths: Sequence[str] | None = None,
    in_strategy: Any = None,
    parameter_plan: Mapping[str, Any] | None = None,
    device: Any = None,
) -> Any:
    """Rematerialise a function or a module: the backward pass recomputes its intermediate values.

    Args:
      fn: a function whose first argument holds its parameters, or a callable module (Flax NNX, Equinox, `Cell`, any
        object with arrays in its attributes).
      mode: False returns `fn` as it is.
      mp_comm_recompute: False keeps the results of collectives, so that none runs again.
      parallel_optimizer_comm_recompute: True gathers sharded parameters again; False keeps the gathered ones. The gather
        of a parameter is an all-gather of the parameter itself, or of a cast of it.
      recompute_slice_activation: True keeps the inputs, without the parameters, sharded over mesh axes on which they are
        replicated, and gathers them in the backward pass. Inside `jax.shard_map` the axes are known; elsewhere set a
        mesh (`jax.set_mesh`) with axes that shard none of the inputs.
      offload: True keeps the inputs in host memory (`pinned_host`) if the device has it.
      paths: globs of submodules to recompute instead of the whole module, such as `"layers/*"`.
      in_strategy: shardings of the arguments as in `shard`, if XLA's partitioner inserts the function's collectives. The
        function is planned, and the flags apply to the collectives of its plan.
      parameter_plan: shardings of parameters by path, likewise.
      device: the devices of that plan.

    Returns:
      A function that computes the same. For a module, a copy of the same class with the same paths and arrays.

    Raises:
      StrategyError, StrategyTypeError: if a flag is no bool, or `paths` match nothing or `fn` is no module.

    >>> import jax, jax.numpy as jnp
    >>> block = recompute(lambda w, x: jnp.tanh(x @ w))
    >>> jax.grad(lambda w: block(w, jnp.ones((2, 3))).sum())(jnp.zeros((3, 3))).shape
    (3, 3)
    """
    options = RematOptions(
        mp_comm_recompute, parallel_optimizer_comm_recompute, recompute_slice_activation, offload,
        in_strategy, parameter_plan, device,
    )  # fmt: skip
    flags = ("mp_comm_recompute", "parallel_optimizer_comm_recompute", "recompute_slice_activation", "offload")
    problems = [problem for name in flags for problem in option_problems(boolean, name, getattr(options, name))]
    if not is_function(fn) and paths is None:
        problems.append(Problem(f"`fn` is {a(fn)}, which cannot be called", f"fn = {short(fn)}",
                                "recompute takes a function or a module", "pass one, or name submodules by `paths`",
                                is_type=True))  # fmt: skip
    problems += option_problems(boolean, "mode", mode)
    raise_problems(problems)
    if not mode:
        return fn
    return _recomputed(fn, options) if paths is None else _by_path(fn, tuple(paths), options)


def communicated(x: Any) -> Any:
    """Mark a value as a collective's result, if no plan shows the collective.

    Args:
      x: an array inside a function that is recomputed.

    Returns:
      The same array, which `recompute(..., mp_comm_recompute=False)` keeps.

    >>> import jax.numpy as jnp
    >>> communicated(jnp.ones(2)).shape
    (2,)
    """
    return checkpoint_name(x, COMMUNICATED)


def _recomputed(fn: Any, options: RematOptions) -> Any:
    is_function = isinstance(fn, types.FunctionType | types.BuiltinFunctionType | types.MethodType)
    if is_function or hasattr(fn, "__wrapped__") or describe(fn).adapter is None:
        return RecomputedFunction(fn, options)
    recomputed = copy.copy(fn)
    object.__setattr__(recomputed, "__class__", _class_of(type(fn), options))
    return recomputed


class RecomputedFunction:
    """A function whose intermediate values are rematerialised."""

    __shardfn_parts__ = "fn", "options"

    def __init__(self, fn: Callable[..., Any], options: RematOptions):
        self.fn, self.options = fn, options
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__wrapped__ = fn

    def __repr__(self) -> str:
        return f"recompute({self.__name__})"

    def with_function(self, fn: Callable[..., Any]) -> RecomputedFunction:
        """The same of another function."""
        return RecomputedFunction(fn, self.options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with rematerialisation in its derivative."""
        return _run(describe(self.fn), self.options, args, kwargs)


_CLASSES: dict[tuple[type, Any], type] = {}


def recomputed_class(cls: type) -> bool:
    """Whether the instances of a class are recomputed."""
    return cls in _CLASSES.values()


def _class_of(cls: type, options: RematOptions) -> type:
    """A subclass whose calls are recomputed, so that an instance keeps its fields and paths."""
    key = cls, repr(options)
    if key not in _CLASSES:
        plain: Any = cls.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _run(describe(types.MethodType(plain, self)), options, args, kwargs)

        with contextlib.suppress(TypeError, ValueError):  # of a `__call__` without one
            call.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
        body = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")} | {"__call__": call}
        _CLASSES[key] = types.new_class(cls.__name__, (cls,), {}, lambda space: space.update(body))
    return _CLASSES[key]


# ---- submodules by path


def _by_path(module: Any, globs: tuple[str, ...], options: RematOptions) -> Any:
    seen: list[str] = []

    def walk(value: Any, path: str) -> Any:
        if path and callable(value) and _has_attributes(value):
            seen.append(path)
            if any(met(glob, [path])[0] for glob in globs):
                return _recomputed(value, options)  # its submodules included
        return _rebuilt(value, path, walk)

    rebuilt = walk(module, "")
    if not seen:
        fail(StrategyError, f"{a(module)} has no submodules to recompute", where=f"paths = {globs!r}",
             why="paths name callable parts of a Cell, a Flax NNX or an Equinox model",
             fix="wrap a block's function in train.recompute; train.step(recompute=n) finds equal blocks by itself")  # fmt: skip
    raise_problems(list(unmet("paths", globs, seen, "submodule")))
    return rebuilt


def _has_attributes(value: Any) -> bool:
    no_module = type | types.ModuleType | types.FunctionType | types.MethodType
    return hasattr(value, "__dict__") and not isinstance(value, no_module)


def _rebuilt(value: Any, path: str, walk: Callable[[Any, str], Any]) -> Any:
    """`value` with its children walked; itself if none changed."""
    children = dict(_children(value))
    walked = {name: walk(child, f"{path}/{name}" if path else str(name)) for name, child in children.items()}
    changed = {name: new for name, new in walked.items() if new is not children[name]}
    if not changed:
        return value
    if isinstance(value, dict | list | tuple):
        return alike(value, walked)
    if isinstance(value, Mapping):
        return type(value)({**value, **changed})  # type: ignore[call-arg]
    new = copy.copy(value)
    for name, child in changed.items():
        if isinstance(name, int):
            new[name] = child
        else:
            object.__setattr__(new, name, child)
    return new


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple) or (type(value).__name__ == "List" and hasattr(value, "__getitem__")):
        yield from enumerate(value)
    elif _has_attributes(value):
        for name, child in vars(value).items():
            if (not name.startswith("_") and not tree_util.all_leaves([child])) or _has_attributes(child):
                yield name, child


# ---- one call


def _run(callee: Callee, options: RematOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    state = callee.read()
    leaves, treedef = tree_util.tree_flatten((state, args, kwargs))
    is_array = lambda leaf: shape_of(leaf) is not None and not isinstance(leaf, bool | int | float)  # noqa: E731
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    first = len(tree_util.tree_leaves(state)) or len(tree_util.tree_leaves(args[:1]))
    is_parameter = [i < first for i in places]

    def pure(*arrays: Any) -> Any:
        filled = list(leaves)
        for i, x in zip(places, arrays, strict=True):
            filled[i] = x
        return callee.call(*tree_util.tree_unflatten(treedef, filled))

    arrays = [leaves[i] for i in places]
    slicings = [_UNSLICED] * len(arrays)
    if options.recompute_slice_activation:
        slicings = [_UNSLICED if p else _slicing(x) for x, p in zip(arrays, is_parameter, strict=True)]
        if all(one is _UNSLICED for one in slicings):
            fail(StrategyError, f"no activation of `{callee.name}` can be kept sharded",
                 where="recompute_slice_activation = True",
                 why="no mesh axis, on which an activation is replicated, divides one of its dimensions",
                 fix="call it inside jax.shard_map or under jax.set_mesh with such an axis, or leave the flag out")  # fmt: skip
    arrays = [slice(x) for x, (slice, _) in zip(arrays, slicings, strict=True)]

    def inside(*arrays: Any) -> Any:
        named = [
            checkpoint_name(x, INPUT) if options.offload and not p else x
            for x, p in zip(arrays, is_parameter, strict=True)
        ]
        full = [gather(x) for x, (_, gather) in zip(named, slicings, strict=True)]
        return _with_names(pure, options, is_parameter, callee, args)(*full)

    result, changed = jax.checkpoint(inside, policy=options.policy)(*arrays)
    callee.write(changed)
    return result


def _with_names(
    pure: Callable[..., Any], options: RematOptions, is_parameter: Sequence[bool], callee: Callee, args: tuple[Any, ...]
) -> Callable[..., Any]:
    """`pure` with names for the results of its collectives."""

    def run(*arrays: Any) -> Any:
        jaxpr = jax.make_jaxpr(pure)(*arrays).jaxpr
        names = dict(_jaxpr_collectives(jaxpr, is_parameter))
        if options.in_strategy is not None or options.parameter_plan is not None:
            names |= _planned_collectives(callee, options, args, jaxpr)

        def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
            return [checkpoint_name(y, names[number]) for y in bind_one(eqn, inputs)]

        return rebind(pure, lambda eqn, number: number in names, bind)(*arrays) if names else pure(*arrays)

    return run


def _jaxpr_collectives(jaxpr: Any, is_parameter: Sequence[bool]) -> Iterator[tuple[int, str]]:
    """The number of each collective in a jaxpr, and the name for its result."""
    copies = _copies(jaxpr, {v for v, p in zip(jaxpr.invars, is_parameter, strict=True) if p})
    for number, eqn, is_reached in equations(jaxpr):
        name = eqn.primitive.name
        if is_reached and name in JAXPR_COLLECTIVES:
            is_gather = name in _GATHERS and all(_is_in(v, copies) for v in eqn.invars)
            yield number, PARAMETER if is_gather else COMMUNICATED


def _copies(jaxpr: Any, known: set[Any]) -> set[Any]:
    """The variables that hold an unchanged parameter."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _COPIES and all(_is_in(v, known) for v in eqn.invars):
            known |= set(eqn.outvars)
        for one in inner(eqn):
            if len(one.invars) == len(eqn.invars):
                known |= _copies(one, {w for v, w in zip(eqn.invars, one.invars, strict=True) if _is_in(v, known)})
    return known


def _is_in(v: Any, known: set[Any]) -> bool:
    return not hasattr(v, "val") and v in known


def _planned_collectives(callee: Callee, options: RematOptions, args: tuple[Any, ...], jaxpr: Any) -> dict[int, str]:
    """The same for the collectives that XLA's partitioner inserts, from the function's plan."""
    shapes = tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if shape_of(x) is not None else x, args
    )
    planned = shard(
        lambda *given: callee.call(callee.read(), given, {})[0] if callee.adapter is not None else callee.function(*given),
        options.in_strategy, device=options.device, parameter_plan=options.parameter_plan, search_mode="sharding_propagation",
    ).plan(*shapes)  # fmt: skip
    partitioned = planned.partitioned
    makers = {value: i for i, op in enumerate(partitioned.graph.ops) for value in op.outputs}
    numbers = anchors(jaxpr, partitioned.graph)
    found = (numbers.get(makers.get(c.operand, -1)) for c in partitioned.communications)
    return {number: COMMUNICATED for number in found if number is not None}


# ---- sharded activations


_Slicing = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""How an activation becomes sharded, and replicated again."""
_UNSLICED: _Slicing = (lambda x: x, lambda x: x)


def _slicing(x: Any) -> _Slicing:
    """Over axes on which `x` is replicated: those of a `shard_map` along which it does not vary, else the mesh's. With
    `check_vma=False` nothing says so, not even that the index of a device varies."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _UNSLICED
    manual = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if "Manual" in str(kind)}
    checked = {name for name in manual if name in _varying(lax.axis_index(name))}
    varying = (manual - checked) | (_varying(x) if manual else frozenset())
    free = tuple(n for n in mesh.axis_names if mesh.shape[n] > 1 and n not in varying and (not manual or n in manual))
    for count in range(len(free), 0, -1):
        axes = free[-count:]
        shards = math.prod(mesh.shape[name] for name in axes)
        for dim, size in enumerate(x.shape):
            if size % shards == 0 and size >= shards:
                return _in_shard_map(dim, axes, shards) if manual else _by_constraint(dim, axes, x.ndim, mesh)
    return _UNSLICED


def _varying(x: Any) -> frozenset[str]:
    """The axes of a `shard_map` along which an array differs between devices."""
    kind = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # the older name


def _in_shard_map(dim: int, axes: tuple[str, ...], shards: int) -> _Slicing:
    def slice(x: Any) -> Any:
        size = x.shape[dim] // shards
        x = lax.pcast(x, axes, to="varying")
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)

    return slice, lambda x: lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying")


def _by_constraint(dim: int, axes: tuple[str, ...], ndim: int, mesh: Any) -> _Slicing:
    def constrain(entry: Any, x: Any) -> Any:
        spec = PartitionSpec(*(entry if i == dim else PartitionSpec.UNCONSTRAINED for i in range(ndim)))
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return functools.partial(constrain, axes), functools.partial(constrain, None)

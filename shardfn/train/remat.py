"""Recompute: what a function works out is forgotten after the forward pass and worked out again in the backward one.

Which collectives run again is said by flags. A collective is found where it stands in the function (`lax.psum` and its
kin, inside `jax.shard_map`), or, where XLA's partitioner makes it, in the plan of the function for the layouts given.
Its result gets a name, and `jax.checkpoint` keeps what has that name.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax, tree_util
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from shardfn.api import shard
from shardfn.errors import Problem, StrategyError, a, fail, raise_problems
from shardfn.frontend.callee import Callee, describe
from shardfn.frontend.paths import met, unmet
from shardfn.frontend.strategy import shape_of, short
from shardfn.ir.rewrite import bind_one, equations, inner, rebind
from shardfn.planning.op_constraints import anchors

COMMUNICATED = "shardfn.communicated"
"""The name of what a collective of the computation gave."""
PARAMETER = "shardfn.parameter"
"""The name of a parameter that was gathered from its pieces."""
INPUT = "shardfn.input"
"""The name of an activation that comes into a recomputed function."""

COLLECTIVES = frozenset({
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced",
    "reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter", "all_to_all", "ppermute", "pgather",
})  # fmt: skip
_GATHERS = frozenset({"all_gather", "all_gather_invariant", "all_gather_reduced"})
_PLAIN = frozenset({
    "convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy", "pvary", "pcast", "copy_p",
})  # fmt: skip
"""What may stand between a parameter and its gather."""


@dataclasses.dataclass(frozen=True)
class Recompute:
    """What was asked for; MindSpore's flags, and more."""

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
    """The policy for `jax.checkpoint` that keeps all but parameters put together from pieces, and copies of something."""
    is_copy = primitive.name in _PLAIN or primitive.name in ("split", "slice", "sharding_constraint")
    return not (is_copy or primitive.name in _GATHERS or params.get("name") == PARAMETER)


def recompute(
    fn: Any,
    *,
    mp_comm_recompute: bool = True,
    parallel_optimizer_comm_recompute: bool = False,
    recompute_slice_activation: bool = False,
    offload: bool = False,
    paths: Sequence[str] | None = None,
    in_strategy: Any = None,
    parameter_plan: Mapping[str, Any] | None = None,
    device: Any = None,
) -> Any:
    """A function, or a module, whose inside is worked out again in the backward pass instead of being kept.

    Args:
      fn: a function whose first argument holds its parameters, or a module that is called (Flax NNX, Equinox, `Cell`,
        any object with arrays in its attributes); of a module a copy is returned, of the same kind and with the same
        paths and arrays.
      mp_comm_recompute: False keeps the results of collectives, which then do not run again.
      parallel_optimizer_comm_recompute: True gathers parameters that lie in pieces again; False keeps them whole. A
        parameter's gather is one of an array that comes from the parameters as it is, or cast.
      recompute_slice_activation: keep what comes in (all but the parameters) in pieces, one on each device along axes
        on which it is whole, and gather it in the backward pass. Inside `jax.shard_map` those axes are found; else set a
        mesh (`jax.set_mesh`) with axes of which none cuts it.
      offload: keep what comes in in the host's memory, where the device has that (`pinned_host`).
      paths: globs of the submodules to do this to, in place of the whole module: "layers/*".
      in_strategy, parameter_plan, device: layouts of the arguments as in `shard`, for a function whose collectives
        XLA's partitioner makes: it is planned, and where the plan has a collective, that is one that the flags mean.

    Raises:
      StrategyError, StrategyTypeError: a flag that is no bool; `paths` without a module, or that match nothing.

    >>> import jax, jax.numpy as jnp
    >>> block = recompute(lambda w, x: jnp.tanh(x @ w))
    >>> jax.grad(lambda w: block(w, jnp.ones((2, 3))).sum())(jnp.zeros((3, 3))).shape
    (3, 3)
    """
    how = Recompute(
        mp_comm_recompute, parallel_optimizer_comm_recompute, recompute_slice_activation, offload,
        in_strategy, parameter_plan, device,
    )  # fmt: skip
    problems = [
        Problem(f"`{name}` must be True or False", f"{name} = {short(getattr(how, name))}", "it is a switch",
                "write True or False", is_type=True)
        for name in ("mp_comm_recompute", "parallel_optimizer_comm_recompute", "recompute_slice_activation", "offload")
        if not isinstance(getattr(how, name), bool)
    ]  # fmt: skip
    if not callable(fn) and paths is None:
        problems.append(Problem(f"`fn` is {a(fn)}, which cannot be called", f"fn = {short(fn)}",
                                "recompute takes a function or a module", "pass one, or name submodules by `paths`",
                                is_type=True))  # fmt: skip
    raise_problems(problems)
    if paths is not None:
        return _by_path(fn, tuple(paths), how)
    return _recomputed(fn, how)


def communicated(x: Any) -> Any:
    """Mark what a collective gives that no plan shows: `recompute(..., mp_comm_recompute=False)` keeps it.

    >>> import jax.numpy as jnp
    >>> communicated(jnp.ones(2)).shape
    (2,)
    """
    return checkpoint_name(x, COMMUNICATED)


def _recomputed(fn: Any, how: Recompute) -> Any:
    if isinstance(fn, types.FunctionType | types.BuiltinFunctionType) or _is_wrapped(fn):
        return Recomputed(fn, how)
    if isinstance(fn, types.MethodType) or not _holds_arrays(fn):
        return Recomputed(fn, how)
    made = copy.copy(fn)
    object.__setattr__(made, "__class__", _class_of(type(fn), how))
    return made


class Recomputed:
    """A function that is recomputed."""

    def __init__(self, fn: Callable[..., Any], how: Recompute):
        self.fn, self.how = fn, how
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        self.__wrapped__ = fn

    def __repr__(self) -> str:
        return f"recompute({self.__name__})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(describe(self.fn), self.how, args, kwargs)


def _is_wrapped(fn: Any) -> bool:
    return hasattr(fn, "__wrapped__")


def _holds_arrays(module: Any) -> bool:
    return describe(module).adapter is not None


_CLASSES: dict[tuple[type, Any], type] = {}


def _class_of(cls: type, how: Recompute) -> type:
    """A subclass that recomputes its calls, so that an instance keeps its fields, its paths and what it is."""
    key = cls, repr(how)
    if key not in _CLASSES:
        plain: Any = cls.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _run(describe(types.MethodType(plain, self)), how, args, kwargs)

        body = {
            "__call__": call,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        }
        _CLASSES[key] = types.new_class(cls.__name__, (cls,), {}, lambda space: space.update(body))
    return _CLASSES[key]


# ---- by path


def _by_path(module: Any, globs: tuple[str, ...], how: Recompute) -> Any:
    seen: list[str] = []

    def walk(value: Any, path: str) -> Any:
        if path and callable(value) and _has_parts(value):
            seen.append(path)
            if any(met(glob, [path])[0] for glob in globs):
                return _recomputed(value, how)  # with what is inside
        return _rebuilt(value, path, walk)

    made = walk(module, "")
    if not seen:
        fail(StrategyError, f"{a(module)} has no submodules to recompute", where=f"paths = {globs!r}",
             why="paths name callable parts of a Cell, a Flax NNX or an Equinox model",
             fix="wrap a block's function in train.recompute; train.step(recompute=n) finds equal blocks by itself")  # fmt: skip
    raise_problems(list(unmet("paths", globs, seen, "submodule")))
    return made


def _has_parts(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | types.FunctionType | types.MethodType)


def _rebuilt(value: Any, path: str, walk: Callable[[Any, str], Any]) -> Any:
    """`value` with its parts walked; itself where none changed."""
    parts = dict(_parts(value))
    made = {name: walk(part, f"{path}/{name}" if path else str(name)) for name, part in parts.items()}
    changed = {name: new for name, new in made.items() if new is not parts[name]}
    if not changed:
        return value
    if isinstance(value, Mapping):
        return type(value)({**value, **changed})  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)(made[i] for i in range(len(parts)))
    new = copy.copy(value)
    for name, part in changed.items():
        if isinstance(name, int):
            new[name] = part
        else:
            object.__setattr__(new, name, part)
    return new


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple) or (type(value).__name__ == "List" and hasattr(value, "__getitem__")):
        yield from enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType | types.FunctionType):
        yield from (
            (k, v)
            for k, v in vars(value).items()
            if (not k.startswith("_") and not tree_util.all_leaves([v])) or _has_parts(v)
        )


# ---- one call


def _run(callee: Callee, how: Recompute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    state = callee.read()
    leaves, treedef = tree_util.tree_flatten((state, args, kwargs))
    places = [
        i for i, leaf in enumerate(leaves) if shape_of(leaf) is not None and not isinstance(leaf, bool | int | float)
    ]
    first = len(tree_util.tree_leaves(state)) or len(tree_util.tree_leaves(args[:1]))
    is_parameter = [i < first for i in places]

    def pure(*arrays: Any) -> Any:
        whole = list(leaves)
        for i, x in zip(places, arrays, strict=True):
            whole[i] = x
        held, given, named = tree_util.tree_unflatten(treedef, whole)
        return callee.call(held, given, named)

    arrays = [leaves[i] for i in places]
    cuts = [
        None if p or not how.recompute_slice_activation else _cut_for(x)
        for x, p in zip(arrays, is_parameter, strict=True)
    ]
    if how.recompute_slice_activation and not any(cuts):
        _no_axis(callee.name)
    arrays = [x if cut is None else cut.sliced(x) for x, cut in zip(arrays, cuts, strict=True)]

    def inside(*pieces: Any) -> Any:
        given = [
            x if p or not how.offload else checkpoint_name(x, INPUT) for x, p in zip(pieces, is_parameter, strict=True)
        ]
        given = [x if cut is None else cut.whole(x) for x, cut in zip(given, cuts, strict=True)]
        return _named(pure, how, is_parameter, callee, args)(*given)

    result, changed = jax.checkpoint(inside, policy=how.policy)(*arrays)
    callee.write(changed)
    return result


def _named(
    pure: Callable[..., Any], how: Recompute, is_parameter: Sequence[bool], callee: Callee, args: tuple[Any, ...]
) -> Callable[..., Any]:
    """`pure` with the results of its collectives named."""

    def run(*arrays: Any) -> Any:
        jaxpr = jax.make_jaxpr(pure)(*arrays).jaxpr
        names = dict(_explicit(jaxpr, is_parameter))
        if how.in_strategy is not None or how.parameter_plan is not None:
            names |= _implicit(callee, how, args, jaxpr)

        def bind(eqn: Any, inputs: list[Any], number: int) -> list[Any]:
            return [checkpoint_name(y, names[number]) for y in bind_one(eqn, inputs)]

        return rebind(pure, lambda eqn, number: number in names, bind)(*arrays) if names else pure(*arrays)

    return run


def _explicit(jaxpr: Any, is_parameter: Sequence[bool]) -> Iterator[tuple[int, str]]:
    """The number of each collective that stands in a jaxpr, and the name that its result gets."""
    plain = _plain(jaxpr, {v for v, p in zip(jaxpr.invars, is_parameter, strict=True) if p})
    for number, eqn, is_reached in equations(jaxpr):
        name = eqn.primitive.name
        if is_reached and name in COLLECTIVES:
            is_gather = name in _GATHERS and all(_is_in(v, plain) for v in eqn.invars)
            yield number, PARAMETER if is_gather else COMMUNICATED


def _plain(jaxpr: Any, known: set[Any]) -> set[Any]:
    """The variables that hold a parameter as it is."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _PLAIN and all(_is_in(v, known) for v in eqn.invars):
            known |= set(eqn.outvars)
        for one in inner(eqn):
            if len(one.invars) == len(eqn.invars):
                known |= _plain(one, {w for v, w in zip(eqn.invars, one.invars, strict=True) if _is_in(v, known)})
    return known


def _is_in(v: Any, known: set[Any]) -> bool:
    return not hasattr(v, "val") and v in known


def _implicit(callee: Callee, how: Recompute, args: tuple[Any, ...], jaxpr: Any) -> dict[int, str]:
    """The same of collectives that the partitioner makes, as the function's plan has them."""
    shapes = tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if shape_of(x) is not None else x, args
    )
    planned = shard(
        lambda *given: callee.call(callee.read(), given, {})[0] if callee.adapter is not None else callee.function(*given),
        how.in_strategy, device=how.device, parameter_plan=how.parameter_plan, search_mode="sharding_propagation",
    ).plan(*shapes)  # fmt: skip
    partitioned = planned.partitioned
    makers = {value: i for i, op in enumerate(partitioned.graph.ops) for value in op.outputs}
    numbers = anchors(jaxpr, partitioned.graph)
    found = {}
    for c in partitioned.communications:
        number = numbers.get(makers.get(c.operand, -1))
        if number is not None:
            found[number] = COMMUNICATED
    return found


# ---- activations in pieces


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How an activation is cut for keeping."""

    sliced: Callable[[Any], Any]
    whole: Callable[[Any], Any]


def _cut_for(x: Any) -> _Cut | None:
    """Along the axes on which it is whole: those of a `shard_map` that it does not vary over, else those of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    manual = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if "Manual" in str(kind)}
    if manual:
        free = tuple(n for n in mesh.axis_names if n in manual and n not in _varying(x) and mesh.shape[n] > 1)
    else:
        free = tuple(n for n in mesh.axis_names if mesh.shape[n] > 1)
    for count in range(len(free), 0, -1):
        axes = free[-count:]
        pieces = 1
        for name in axes:
            pieces *= mesh.shape[name]
        for dim, size in enumerate(x.shape):
            if size % pieces == 0 and size >= pieces:
                return _in_shard_map(dim, axes, pieces) if manual else _by_constraint(dim, axes, x.ndim, mesh)
    return None


def _varying(x: Any) -> frozenset[str]:
    """The axes of a `shard_map` along which an array differs from device to device."""
    kind = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # the older name


def _in_shard_map(dim: int, axes: tuple[str, ...], pieces: int) -> _Cut:
    def sliced(x: Any) -> Any:
        size = x.shape[dim] // pieces
        x = lax.pcast(x, axes, to="varying")
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)

    return _Cut(sliced, lambda x: lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying"))


def _by_constraint(dim: int, axes: tuple[str, ...], ndim: int, mesh: Any) -> _Cut:
    held = PartitionSpec.UNCONSTRAINED
    cut = NamedSharding(mesh, PartitionSpec(*(axes if i == dim else held for i in range(ndim))))
    whole = NamedSharding(mesh, PartitionSpec(*(None if i == dim else held for i in range(ndim))))
    return _Cut(
        lambda x: lax.with_sharding_constraint(x, cut),
        lambda x: lax.with_sharding_constraint(x, whole),
    )


def _no_axis(name: str) -> None:
    fail(
        StrategyError, f"no activation of `{name}` can be kept in pieces", where="recompute_slice_activation = True",
        why="there is no axis along which one lies whole and whose size divides one of its dims",
        fix="call it inside jax.shard_map or under jax.set_mesh with such an axis, or leave the flag out",
    )  # fmt: skip

"""The mesh around a call: that of its arguments' types, of `jax.set_mesh` or `jax.shard_map`, or of an outer sharded function.

Explicit axes put shardings into the types of arrays (`jax.typeof(x).sharding`), Manual ones belong to a `shard_map`. A call
is planned over the other axes, for which XLA propagates shardings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.core import Tracer
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardfn.errors import StrategyError, fail
from shardfn.frontend.jax_errors import AXES_OF_TYPE, JaxError, statement
from shardfn.frontend.meshes import partition_spec, spec_of
from shardfn.frontend.outer_call import outer_mesh
from shardfn.frontend.trace import shaped
from shardfn.ir.auto_types import with_auto_axes
from shardfn.ir.model import Axes, Spec, mesh_text


@dataclasses.dataclass(frozen=True)
class AmbientMesh:
    """The mesh around a call."""

    abstract: AbstractMesh
    concrete: Mesh | None = None
    """None in a traced function: there a mesh has no devices."""

    @property
    def axes(self) -> Axes:
        """Name and size of each axis that is not Manual."""
        return tuple((name, n) for name, n in self.abstract.shape.items() if name not in self.abstract.manual_axes)

    @property
    def explicit(self) -> frozenset[str]:
        """The Explicit axes."""
        return frozenset(self.abstract.explicit_axes)

    @property
    def is_binding(self) -> bool:
        """Whether no other mesh can be used here: JAX refuses one beside Explicit or Manual axes."""
        return bool(self.abstract.explicit_axes or self.abstract.manual_axes)

    @property
    def auto(self) -> AbstractMesh:
        """The mesh with axes of type Auto in the place of Explicit ones."""
        return self.abstract.update_axis_types(dict.fromkeys(self.abstract.explicit_axes, AxisType.Auto))

    def type_of(self, sharding: NamedSharding) -> NamedSharding:
        """The sharding that the type of an array with `sharding` has: its Explicit axes."""
        typed, _ = self.split(spec_of(sharding.spec, len(sharding.spec)))
        return NamedSharding(self.abstract, partition_spec(typed))

    def explicit_spec(self, spec: Spec) -> Spec | None:
        """The Explicit axes of a spec; None where these shard no dimension."""
        typed, _ = self.split(spec)
        return typed if any(typed) else None

    def split(self, spec: Spec) -> tuple[Spec, Spec]:
        """The Explicit axes of a spec, and its other axes."""
        explicit = self.explicit
        return (
            tuple(tuple(axis for axis in dim if axis in explicit) for dim in spec),
            tuple(tuple(axis for axis in dim if axis not in explicit) for dim in spec),
        )


def ambient_mesh(values: Any) -> AmbientMesh | None:
    """The mesh around a call.

    Raises:
      StrategyError: an argument has a type on another mesh than the one around.

    >>> ambient_mesh(1.0) is None
    True
    """
    abstract = jax.sharding.get_abstract_mesh()
    for leaf in tree_util.tree_leaves(values):
        if (found := _typed(leaf)) is not None:
            if not abstract.empty and abstract.shape_tuple != found.mesh.shape_tuple:
                one, other = (mesh_text(mesh.shape_tuple) for mesh in (found.mesh, abstract))
                fail(StrategyError, f"an argument is on the mesh {one}, and the mesh around the call is {other}",
                     where=f"{jax.typeof(leaf)}",
                     why="the type of an array with Explicit axes names axes of its mesh",
                     fix="call it inside jax.set_mesh of the argument's mesh, or put the argument on the mesh around: "
                         "jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), spec))")  # fmt: skip
            return AmbientMesh(found.mesh.abstract_mesh, found.mesh if isinstance(found.mesh, Mesh) else _set_mesh())
    if not abstract.empty:
        return AmbientMesh(abstract, _set_mesh())
    outer = outer_mesh()
    return AmbientMesh(outer) if outer is not None else None


def on_mesh_around(x: Any, spec: PartitionSpec) -> NamedSharding:
    """A `PartitionSpec` on the mesh around.

    Args:
      x: the array that it is for.
      spec: axis names of that mesh for each dimension.

    Raises:
      StrategyError: there is no mesh around, or it has no such axes.
    """
    around, where = ambient_mesh(x), f"sharding = {spec}"
    if around is None:
        fail(StrategyError, "a PartitionSpec names axes, and there is no mesh around that has them", where=where,
             why="the mesh around is that of `shard(f, device=mesh)` or `jax.set_mesh`",
             fix=f"give one of them, or write NamedSharding(mesh, {spec})")  # fmt: skip
    mesh = around.concrete if around.concrete is not None and not isinstance(x, Tracer) else around.abstract
    try:
        sharding = NamedSharding(mesh, spec)
        sharding.check_compatible_aval(x.shape)
    except Exception as error:  # JAX's DuplicateSpecError has no public name
        fail(StrategyError, "the PartitionSpec does not fit the array on the mesh around it",
             where=f"{where}; the array has the shape {tuple(x.shape)}, the mesh {mesh_text(around.axes)}",
             why=str(error).split("\n")[0],
             fix="name each axis of the mesh once at most, for the dimensions that the array has")  # fmt: skip
    return sharding


def reshard_traced(x: Any, sharding: NamedSharding) -> Any:
    """`jax.lax.with_sharding_constraint` for a traced array, and a change of its type over Explicit axes.

    Args:
      x: the array.
      sharding: a mesh that differs from the mesh around only in the types of its axes stands for that mesh.
    """
    around = ambient_mesh(x)
    if around is not None and around.abstract.shape_tuple == sharding.mesh.shape_tuple:
        sharding = NamedSharding(around.abstract, sharding.spec)
        if around.explicit:
            x = jax.sharding.reshard(x, around.type_of(sharding))
            _, rest = around.split(spec_of(sharding.spec, x.ndim))
            sharding = NamedSharding(around.abstract, partition_spec(rest))
            if not any(rest):
                return x
    return jax.lax.with_sharding_constraint(x, sharding)


def has_types(values: Sequence[Any]) -> bool:
    """Whether the type of any array has Explicit axes."""
    return any(_typed(leaf) is not None for leaf in tree_util.tree_leaves(values))


def explicit_specs(values: Any) -> tuple[Spec | None, ...]:
    """For each array the Explicit axes of its type; None where these shard no dimension."""
    return tuple(map(_explicit_spec, tree_util.tree_leaves(values)))


@contextlib.contextmanager
def without_types(ambient: AmbientMesh | None, name: str) -> Iterator[None]:
    """A context in which the types of traced arrays have no shardings.

    Args:
      ambient: the mesh that the call uses, if any.
      name: of the function that is traced.

    Raises:
      StrategyError: the function itself works with Explicit axes.
    """
    abstract = jax.sharding.get_abstract_mesh()
    here = AmbientMesh(abstract) if ambient is None or not abstract.empty else ambient
    if not here.explicit:
        yield
        return
    with jax.sharding.use_abstract_mesh(here.auto), explained_types(name):
        yield


def typed_closure(
    function: Callable[..., Any], ambient: AmbientMesh, static_argnums: tuple[int, ...]
) -> Callable[..., Any]:
    """`function`, for contexts in which types have no shardings, also where the arrays that it closes over have some.

    JAX refuses such an array beside others. The function is then traced with the Explicit axes, which shard none of its
    arguments, and its jaxpr loses them.

    Args:
      function: of positional arguments.
      ambient: the mesh around the call.
      static_argnums: as in `jax.jit`.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        try:
            return function(*args)
        except (ValueError, TypeError) as error:
            if _closed_over(error) is None:
                raise
            refused = error
        shapes = [v if i in static_argnums else tree_util.tree_map(shaped, v) for i, v in enumerate(args)]
        try:
            with jax.sharding.use_abstract_mesh(ambient.abstract):
                closed, result = jax.make_jaxpr(function, static_argnums, return_shape=True)(*shapes)
        except Exception:  # types that JAX refuses have an error without a public name
            raise refused from None
        leaves = tree_util.tree_leaves([v for i, v in enumerate(args) if i not in static_argnums])
        flat = core.jaxpr_as_fun(with_auto_axes(closed, ambient.abstract))(*leaves)
        return tree_util.tree_unflatten(tree_util.tree_structure(result), flat)

    return run


@contextlib.contextmanager
def explained_types(name: str) -> Iterator[None]:
    """A context in which JAX's errors for a function that works with types that have Explicit axes are explained.

    Raises:
      StrategyError: it is such an error.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        _refuse_types(name, error)
        raise


def _refuse_types(name: str, error: Exception) -> None:
    """Explain JAX's error for a function that works with types that have Explicit axes.

    Raises:
      StrategyError: it is such an error.
    """
    if (where := _closed_over(error)) is not None:
        fail(StrategyError, f"`{name}` closes over an array whose type has Explicit axes", where=where,
             why="inside a sharded function all axes are Auto; the type is kept where the array is traced outside, or where the "
                 "function does not trace with Explicit axes",
             fix="pass the array as an argument, close over numpy.asarray(array), make it (or import its library) before "
                 "jax.set_mesh, or set a mesh with Auto axes")  # fmt: skip
    if JaxError.SHARD_MAP_MESH.match(error):
        fail(StrategyError, f"`{name}` has a `jax.shard_map` on a mesh with Explicit axes", where=statement(error),
             why="inside a sharded function all axes are Auto",
             fix="leave `mesh` out of jax.shard_map: it uses the mesh around it")  # fmt: skip
    if JaxError.EXPLICIT_AXES_WANTED.match(error):
        fail(StrategyError, f"`{name}` asks for Explicit axes inside", where=statement(error),
             why="inside a sharded function all axes are Auto",
             fix="leave out_sharding and jax.reshard out, or use jax.lax.with_sharding_constraint")  # fmt: skip


def _closed_over(error: Exception) -> str | None:
    """What JAX's error says of a closed-over array whose type has Explicit axes: its type or its place in the source."""
    if found := JaxError.CLOSED_OVER_TYPE.match(error) or JaxError.CLOSED_OVER_SHARDING.match(error):
        return found["what"]
    types = JaxError.TYPES_DIFFER.match(error)
    is_same = types is not None and AXES_OF_TYPE.sub("", types["one"]) == AXES_OF_TYPE.sub("", types["other"])
    return types["other"] if types is not None and is_same else None  # only the Explicit axes differ


def typed_shape(leaf: Any, shape: Any) -> Any:
    """The shape of a leaf (`frontend.trace.shaped`) with the Explicit axes of the leaf's type."""
    typed = _typed(leaf)
    return (
        shape
        if typed is None
        else jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type, sharding=typed)
    )


def _typed(leaf: Any) -> NamedSharding | None:
    """The sharding of an array whose type has Explicit axes."""
    if isinstance(leaf, Tracer):
        found: Any = jax.typeof(leaf).sharding
    else:
        found = leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    return found if isinstance(found, NamedSharding) and found.mesh.explicit_axes else None


def _explicit_spec(leaf: Any) -> Spec | None:
    typed = _typed(leaf)
    if typed is None:
        return None
    return AmbientMesh(typed.mesh.abstract_mesh).explicit_spec(spec_of(typed.spec, len(leaf.shape)))


def _set_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh`; None without one, and in a traced function."""
    try:
        found = jax.sharding.get_mesh()
    except ValueError:
        return None
    return None if found.empty else found

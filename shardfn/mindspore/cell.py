"""`Cell`: class-style code whose instances are sharded one by one, as in MindSpore."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from shardfn.api import shard
from shardfn.errors import StrategyError, closest, fail
from shardfn.frontend.callee import State, describe
from shardfn.frontend.other_words import refuse_attribute
from shardfn.frontend.plain_objects import SHARDED
from shardfn.mindspore.bprop import with_bprop
from shardfn.mindspore.names import ON_CELLS
from shardfn.mindspore.parallel import by_type


class Cell:
    """A mix-in for class-style code: `block.shard(in_strategy=((8, 1),))` shards the calls of that one instance.

    Write `__call__`, or `construct` as in MindSpore. A `bprop(*inputs, out, dout)` beside it is its gradient: a tuple of one
    for each input. The arrays in the instance's attributes, also in lists, dicts, pytrees and other Cells, are
    arguments of the compiled function, so `parameter_plan` can name them: `{"w1": (1, 4)}`.
    Another base class is possible: `class Block(Cell, nnx.Module)`.

    >>> import jax.numpy as jnp
    >>> class Dense(Cell):
    ...     def __init__(self): self.w = jnp.ones((8, 4))
    ...     def __call__(self, x): return x @ self.w
    >>> dense = Dense()
    >>> _ = dense.shard(in_strategy=((1, 1),), out_strategy=(None,))
    >>> dense(jnp.ones((2, 8))).shape
    (2, 4)
    """

    __shardfn_cell__ = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        plain = cls.__dict__.get("__call__")
        if plain is None and hasattr(cls.__call__, "__construct__"):
            cls.__call__ = _construct_call(cls.construct)  # for its signature
        elif plain is not None and not hasattr(plain, "__unsharded__"):
            cls.__call__ = _sharding_call(plain)  # type: ignore[method-assign]

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """The computation of a subclass without `__call__`.

        Raises:
          NotImplementedError: the subclass has neither `__call__` nor `construct`.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither `__call__` nor `construct`")

    def shard(
        self,
        in_strategy: Any = None,
        out_strategy: Any = None,
        parameter_plan: Any = None,
        device: Any = None,
        level: int | str | None = None,
        **options: Any,
    ) -> Any:
        """Shard the calls of this instance from now on. By position the order is that of MindSpore 2.x, or the older one,
        `(in_strategy, out_strategy, device, level)`: the types tell them apart.

        Args:
          in_strategy: entries of the arguments, as in `shardfn.shard`.
          out_strategy: entries of the results.
          parameter_plan: entries of the instance's arrays, by path.
          device: as in `shardfn.shard`.
          level: as in `shardfn.shard`.
          options: the other options of `shardfn.shard`.

        Returns:
          The instance.

        Raises:
          ShardError: an option is wrong.
        """
        parameter_plan, device, level = by_type(parameter_plan, device, level)
        function = shard(types.MethodType(type(self).__call__, self), in_strategy, out_strategy, device, level,
                         parameter_plan=parameter_plan, **options)  # fmt: skip
        object.__setattr__(self, SHARDED, Unlisted(function))
        return self

    def __getattr__(self, name: str) -> Any:
        if (of_base := getattr(super(), "__getattr__", None)) is not None:  # Linen's modules have one
            return of_base(name)
        use = f"; use {ON_CELLS[name]}" if name in ON_CELLS else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{use}", name=name, obj=self)

    @property
    def requires_grad(self) -> bool:
        """Always True: `frozen=` of `shardfn.train.step` says what is not trained."""
        return True

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        refuse_attribute("requires_grad", value, "<path of the cell>/*", type(self).__name__)

    def recompute(self, mode: bool = True, **options: Any) -> Any:
        """Rematerialise the calls of this instance: the backward pass recomputes its intermediate values.

        Args:
          mode: False leaves the instance as it is.
          options: those of `shardfn.train.recompute`, such as MindSpore's `mp_comm_recompute`.

        Returns:
          The instance.

        Raises:
          ShardError: an option is wrong, or the instance is recomputed already.

        >>> import jax.numpy as jnp
        >>> class Scale(Cell):
        ...     def __init__(self): self.by = jnp.float32(3)
        ...     def __call__(self, x): return self.by * x
        >>> float(Scale().recompute()(2.0))
        6.0
        """
        from shardfn.train.remat import recompute, recomputed_class  # `train` needs optax

        changed = recompute(self, mode=mode, **options)
        if changed is not self:
            if recomputed_class(type(self)):
                fail(StrategyError, f"this {type(self).__name__} is recomputed already", where="recompute()",
                     why="a cell is configured once, as in MindSpore", fix="call recompute once, with all options")  # fmt: skip
            object.__setattr__(self, "__class__", type(changed))
        return self

    def set_param_ps(self, recurse: bool = True, init_in_server: bool = False) -> None:
        """Keep the arrays of this instance on parameter servers, which `shardfn.mindspore.parameter_server` makes.

        Args:
          recurse: False leaves out the arrays of the Cells in it.
          init_in_server: MindSpore's option to make the first rows on the servers; only False is available.

        Raises:
          ClusterError: the parameter server is not on, or no role is set.
          NotAvailableError: `init_in_server` is True.
        """
        from shardfn.mindspore.parameter_server import mark  # its engines are above the core

        mark(self, recurse, init_in_server)

    def parameters_dict(self) -> State:
        """The arrays of this instance, to differentiate or optimise.

        Returns:
          A flat dict by path, which is a pytree.
        """
        return describe(self).read()

    def with_parameters(self, parameters: State) -> Any:
        """A copy of this instance with other arrays, sharded if this one is. `jax.grad` passes through it.

        Args:
          parameters: arrays by path; a path that is left out keeps its array.

        Raises:
          StrategyError: a path that is not in `parameters_dict`.

        >>> import jax, jax.numpy as jnp
        >>> class Scale(Cell):
        ...     def __init__(self): self.by = jnp.float32(3)
        ...     def __call__(self, x): return self.by * x
        >>> scale = Scale()
        >>> jax.grad(lambda p: scale.with_parameters(p)(2.0))(scale.parameters_dict())["by"].item()
        2.0
        """
        callee = describe(self)
        assert callee.adapter is not None
        known = callee.read()
        for name in [name for name in parameters if name not in known]:
            close = closest(name, known) or list(known)[:20]
            fail(StrategyError, f"{type(self).__name__} has no array `{name}`", fix=f"use one of {', '.join(close)}")
        return callee.adapter.rebuild(self, parameters)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """The `Plan` of a call, after `shard`, for arrays or shapes (`ShardedFunction.plan`)."""
        return self._sharded().plan(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """The `Report` of a call, after `shard`, for arrays or shapes, with the options of `ShardedFunction.explain`."""
        return self._sharded().explain(*args, **kwargs)

    def _sharded(self) -> Any:
        found = self.__dict__.get(SHARDED)
        if found is None:
            raise AttributeError(f"this {type(self).__name__} is not sharded yet: call its .shard(...) first")
        return found.function


class Unlisted:
    """The sharded function of an instance and of its copies: `nnx.grad` and `with_parameters` call a copy."""

    def __init__(self, function: Any):
        self.function = function

    def of(self, owner: Any) -> Any:
        """The function of `owner`, which shares the plans of all copies."""
        return self.function if self.function.callee.owner is owner else self.function.for_owner(owner)

    def __deepcopy__(self, memo: Any) -> Unlisted:
        return self


def _sharding_call(plain: Callable[..., Any]) -> Callable[..., Any]:
    plain = with_bprop(plain)

    @functools.wraps(plain)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self, SHARDED, None)
        return plain(self, *args, **kwargs) if found is None else found.of(self)(*args, **kwargs)

    __call__.__unsharded__ = plain  # type: ignore[attr-defined]
    return __call__


def _construct_call(construct: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(construct)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.construct(*args, **kwargs)

    sharding = _sharding_call(call)
    sharding.__construct__ = True  # type: ignore[attr-defined]
    return sharding


Cell.__call__ = _construct_call(Cell.construct)  # type: ignore[attr-defined]

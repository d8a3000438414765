"""The callable that `shard` returns: it plans the first call of a kind, and runs later ones through `jax.jit`.

The kind of a call is its shapes, dtypes, structure, keywords and static values, the process's default settings, and JAX's
x64 switch; and of one kind are calls that would read the same Python state (`frontend.watch`). A call costs what `jax.jit`
costs if all calls so far are of one kind, have positional arguments only, call no module, and pass arrays with the planned
shardings.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import jax
from jax import tree_util
from jax.core import Tracer

from shardfn.compiled.executable import read
from shardfn.errors import Problem, raise_problems
from shardfn.frontend import defaults
from shardfn.frontend.arguments import Call
from shardfn.frontend.callee import Callee, describe
from shardfn.frontend.inputs_outputs import input_leaves
from shardfn.frontend.notes import Counted
from shardfn.frontend.option_checks import refuse_clash
from shardfn.frontend.options import Options
from shardfn.frontend.outer_call import is_on_parts, outer_hardware
from shardfn.frontend.static_leaves import restore_static
from shardfn.frontend.user_errors import begin_in_function
from shardfn.frontend.wrapped import unwrapped, wrapped
from shardfn.planning.call import OtherCall, call_inside, pure_function
from shardfn.planning.plan import Plan
from shardfn.report.report import Report, in_detail, make_report
from shardfn.runtime.agreement import CheckResult
from shardfn.runtime.apply import counted_run, finish, lies_elsewhere, moved
from shardfn.runtime.call_checks import (
    CONCRETE,
    are_usable,
    refuse_donated_twice,
    refuse_shapes,
    refuse_shard_map,
    refuse_target,
    refuse_target_of_report,
    transfers,
)
from shardfn.runtime.check import check_entry, checked, refuse_uncheckable, warn_of_tracers
from shardfn.runtime.executable import Entry, agreed, jitted_as_called
from shardfn.runtime.fast_path import FastPath
from shardfn.runtime.method_of import MethodOf
from shardfn.runtime.nested_call import run_nested
from shardfn.runtime.planned_calls import PlannedCalls
from shardfn.runtime.processes import check_devices, is_traced
from shardfn.runtime.progress import progress
from shardfn.runtime.shared_entries import Kept, held_by, kept_for

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Callable[..., Any])


def _of_instance(method: M) -> M:
    """A method of `ShardedFunction` that takes the arguments of a call, also where the first is the instance (`_method_of`)."""

    @functools.wraps(method)
    def call(self: ShardedFunction, /, *args: Any, **kwargs: Any) -> Any:
        own = self._method_of(args)
        try:
            return method(self, *args, **kwargs) if own is None else method(own, *args[1:], **kwargs)
        except Exception as error:
            begin_in_function(error)
            raise

    return call  # type: ignore[return-value]


class ShardedFunction(Generic[P, R]):
    """A sharded function, as `shard` returns it. Call it like the function itself.

    It has the methods of a function from `jax.jit` (`lower`, `trace`, `eval_shape`, `clear_cache`, `__wrapped__`), and
    `plan` and `explain`. It keeps one plan and executable for each kind of call, up to 128, and shares them with other sharded
    functions of the same function with the same options.

    Its methods take the arguments of a call, and raise a `ShardError` with all problems of the call. All but `check` also take
    their shapes (`jax.ShapeDtypeStruct`). All keywords go to the function, but for those that `explain` has.
    """

    __shardfn_parts__ = "fn", "options"
    of_module: ClassVar[tuple[Callable[[Any], bool], type] | None] = None
    """What a function of a module becomes (`runtime.sharded_module`)."""

    def __new__(cls, fn: Callable[P, R], options: Options) -> ShardedFunction[P, R]:
        """A `ShardedModule` for a function of a module that is a pytree."""
        is_of_module = cls.of_module is not None and cls.of_module[0](fn)
        return object.__new__(cls.of_module[1] if is_of_module and cls.of_module else cls)

    def __init__(self, fn: Callable[P, R], options: Options):
        self.fn = fn
        self.options = options
        self.callee: Callee = describe(fn)
        functools.update_wrapper(self, fn, updated=())
        self._calls = PlannedCalls(self.callee, options, kept_for(fn, options) if self.callee.is_plain else Kept())
        self._fast = FastPath()
        self._donates = bool(options.donate_argnums or options.donate_argnames)

    def __repr__(self) -> str:
        given = ", ".join(
            f"{f.name}={getattr(self.options, f.name)!r}"
            for f in dataclasses.fields(Options)
            if getattr(self.options, f.name) != f.default
        )
        return f"shard({self.callee.name}{', ' if given else ''}{given})"

    def __eq__(self, other: Any) -> bool:
        """A method of one object equals itself each time that it is looked up, as Python's methods do."""
        if self is other or not isinstance(other, ShardedFunction) or not isinstance(self.fn, types.MethodType):
            return self is other
        return self.fn == other.fn and self.options is other.options

    def __hash__(self) -> int:
        return hash(self.fn) if isinstance(self.fn, types.MethodType) else object.__hash__(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes that a program gives it are the function's own, where a call sees their changes."""
        is_own = name in _ATTRIBUTES or name.startswith("__")
        (object.__setattr__ if is_own else setattr)(self if is_own else self.fn, name, value)

    def __getattr__(self, name: str) -> Any:
        fn = self.__dict__.get("fn")
        if isinstance(fn, types.FunctionType) and name in vars(fn) and not name.startswith("__"):
            return vars(fn)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a decorated method: bound to the instance, whose arrays become arguments where its kind is known."""
        if instance is None:
            return self
        bound = types.MethodType(self.fn, instance)
        held = held_by(instance, makes=False)
        if held is not None and self in held.methods:
            return held.methods[self].bound_to(bound)
        found = ShardedFunction(bound, self.options.of_bound_method())
        is_own = found.callee.owner is instance and found.callee.is_plain and not found.callee.read()
        held = (
            held_by(instance) if is_own else None
        )  # what is compiled keeps a copy of the instance: that goes when it goes
        if held is None:
            found._calls.entries = self._calls.entries  # `nnx.grad` makes a new instance for every call
        else:
            held.methods[self] = MethodOf(found)
        return found

    def __reduce__(self) -> Any:
        """By its name where the function was decorated, as JAX's and Python's own decorated functions."""
        name, module = getattr(self.fn, "__qualname__", ""), sys.modules.get(getattr(self.fn, "__module__", ""))
        try:
            is_global = operator.attrgetter(name)(module) is self
        except AttributeError:
            is_global = False
        return name if is_global else (ShardedFunction, (self.fn, self.options))

    def for_owner(self, owner: Any) -> ShardedFunction:
        """The same method of another instance, such as a copy made by `nnx.grad`.

        Args:
          owner: the other instance.

        Returns:
          A `ShardedFunction` that shares the plans of this one.
        """
        return self.with_function(wrapped(owner, unwrapped(self.fn)[1]))

    def with_function(self, fn: Callable[..., Any]) -> ShardedFunction:
        """The same of another function.

        Args:
          fn: the function of another instance.

        Returns:
          A `ShardedFunction` that shares the plans of this one.
        """
        other = ShardedFunction(fn, self.options)
        other._calls.entries = self._calls.entries
        return other

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function sharded; the first call of a kind plans and compiles it.

        Args:
          args: the positional arguments of the function. Arrays with another sharding are transferred.
          kwargs: its keyword arguments.

        Returns:
          The function's result. Its arrays have the planned shardings.

        Raises:
          ShardError: all problems of the call.
        """
        # The shapes need no check here: `jit` looks them up, and traces for new ones, which raises OtherCall.
        fast = self._fast
        if (
            not kwargs
            and defaults.current() is fast.defaults
            and jax.sharding.get_abstract_mesh() is fast.context
            and outer_hardware() is None
            and (not fast.checks_arrays or are_usable(tree_util.tree_leaves(args), self._donates))
            and fast.watch.holds(self.callee.root)
        ):
            try:
                return fast.run(*args)
            except (OtherCall, ValueError, TypeError):  # a TypeError for a leaf that is no array
                pass
        try:
            return self._call(args, kwargs)
        except Exception as error:
            begin_in_function(error)
            raise

    @_of_instance
    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """The `Plan` that a call runs with. It is made once."""
        return self._calls.planned(*self._calls.bound(args, kwargs, "plan"))[1].plan

    @_of_instance
    def explain(
        self,
        /,
        *args: Any,
        compiled: bool = False,
        run: bool = False,
        rehearse: bool = False,
        detail: str = "short",
        **kwargs: Any,
    ) -> Report:
        """The report of a call.

        Args:
          args: the positional arguments, or their shapes.
          compiled: whether to compile the call and put XLA's collectives and memory beside the predicted ones.
          run: whether to run the call once, and report what only a run knows: the tokens of each expert that `experts.route`
            chose, and how many were dropped. Nothing is donated, and the results are left out.
          rehearse: whether to measure one device's part on one device (`Plan.rehearse`).
          detail: "short", or "full" for every section.
          kwargs: the keyword arguments.

        Returns:
          The `Report`. Print it, `save` it as a page, or use `to_dict`.

        Raises:
          ShardError: all problems of the call, or a parameter of the function named as an option here.
          DeviceError: `compiled` or `run` for devices that are not here.
        """
        parameters = self.callee.signature.parameters if self.callee.signature else {}
        for name, value, is_default in (
            ("compiled", compiled, compiled is False),
            ("run", run, run is False),
            ("rehearse", rehearse, rehearse is False),
            ("detail", detail, isinstance(detail, str) and detail == "short"),
        ):
            if name in parameters and not is_default:
                refuse_clash(name, value, "`explain`", f"shardfn.explain(shard(f).plan(...), {name}=...)")
        callee, call = self._calls.bound(args, kwargs, "explain")
        call, entry = self._calls.planned(callee, call)
        refuse_target_of_report(entry.plan.hardware, compiled, run)
        if compiled:
            entry = self._calls.compiled(callee, call, entry, lambda e: e.shapes(call))
        lowered = self._lower(entry, call, len(call.slots)) if compiled else None
        found = read(lowered.compile(), self.options.assumed_trips) if lowered is not None else None
        if found is not None:
            found = dataclasses.replace(found, diagnostics=(*found.diagnostics, *entry.logged))
        counted = self._counted(callee, call, entry) if run else None
        plan = entry.plan.rehearse() if rehearse else entry.plan
        return in_detail(
            make_report(plan, found, transfers(plan, tree_util.tree_leaves(call.dynamic), entry.targets), counted),
            detail,
        )

    @_of_instance
    def check(self, /, *args: Any, **kwargs: Any) -> CheckResult:
        """Run a call sharded and unsharded, and compare results and gradients leaf by leaf. No argument is donated, and a module
        keeps its arrays.

        Returns:
          The `CheckResult`: print it for a table. A difference is no error; ask `agrees`.

        Raises:
          ShardError: all problems of the call, or devices that are not here or belong to several processes.

        >>> import jax.numpy as jnp, shardfn
        >>> shardfn.shard(lambda x: 2 * x, ((4, 1),)).check(jnp.ones((8, 4))).headline
        '<lambda>: 3 arrays agree; compared with the unsharded function on one CPU device'
        """
        callee, call = self._calls.bound(args, kwargs)
        call, entry = self._calls.planned(callee, call)
        refuse_uncheckable(entry.plan)
        if call.closed_over is not None:
            call = self._calls.placed(callee, call, entry)
        leaves, treedef = tree_util.tree_flatten(call.dynamic)
        refuse_shapes(self.callee.name, entry.plan, leaves)
        entry = self._calls.compiled(callee, call, entry, lambda e: _arrays(call, e, leaves, treedef))
        return check_entry(entry, leaves)

    @_of_instance
    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower the sharded function for a call, as `jax.jit(f).lower` does.

        Returns:
          JAX's own stage. Its `compile()` gives a function of the call's arrays, a module's arrays first, keywords by keyword.
        """
        callee, call = self._calls.bound(args, kwargs, "lower")
        call, entry = self._calls.planned(callee, call)
        return self._lower(entry, call, len(args))

    @_of_instance
    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace the sharded function for a call, as `jax.jit(f).trace` does.

        Returns:
          JAX's own stage, with the `jaxpr` and the plan's constraints in it.
        """
        callee, call = self._calls.bound(args, kwargs, "trace")
        call, entry = self._calls.planned(callee, call)
        jitted, shapes, keywords = jitted_as_called(entry, call, len(args))
        return jitted.trace(*shapes, **keywords)

    @_of_instance
    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """The shapes and dtypes of the results of a call, without planning it.

        Returns:
          A pytree of `jax.ShapeDtypeStruct` with the structure of the result.
        """
        callee, call = self._calls.bound(args, kwargs, "eval_shape")
        problems: list[Problem] = []
        input_leaves(callee, self.options, call, defaults.current(), problems)
        raise_problems(problems)
        result = self._calls.results(callee, call)
        return restore_static(result[0] if call.returns_changes else result)

    def clear_cache(self) -> None:
        """Forget all plans and compiled programs of this function with these options."""
        self._calls.entries.clear()
        self._calls.closed_over.clear()
        self._calls.results_of.clear()
        self._fast.close()

    # ---- inside

    def _method_of(self, args: tuple[Any, ...]) -> ShardedFunction | None:
        """This method bound to the first argument, where that is an instance or the class that has it: `Dense.apply(dense, x)`,
        a property, and a class method, which binds no descriptors since Python 3.13."""
        first = args[0] if args else None
        kind, name = first if isinstance(first, type) else type(first), getattr(self.fn, "__name__", "")
        held = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
        held = [value for value in held if not isinstance(value, staticmethod)]
        is_static = self.options.static_argnums or self.options.static_argnames
        if any(self in (value, *(getattr(value, part, None) for part in _HOLDING)) for value in held) or (
            isinstance(first, type) and not is_static
        ):
            return self.__get__(first)
        return None

    def _lower(self, entry: Entry, call: Call, given: int) -> jax.stages.Lowered:
        jitted, shapes, keywords = jitted_as_called(entry, call, given)
        if entry.plan.hardware.is_here:
            return jitted.lower(*shapes, **keywords)
        traced = jitted.trace(*shapes, **keywords)
        return traced.lower(lowering_platforms=(entry.plan.hardware.platform,))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self.fn(*args, **kwargs)
        if is_on_parts(self.callee.name):
            callee, call = self._calls.bound(args, kwargs)
            return finish(callee, call, pure_function(callee, call)(*call.values))
        refuse_shard_map(self.callee.name)
        if (own := self._method_of(args)) is not None:
            return own(*args[1:], **kwargs)
        known = len(self._calls.entries)
        callee, call = self._calls.bound(args, kwargs)
        outer = outer_hardware() if self.options.layout is None else None
        if outer is not None and any(isinstance(leaf, Tracer) for leaf in tree_util.tree_leaves(call.dynamic)):
            return finish(callee, call, call_inside(callee, self.options, call, outer))
        refuse_donated_twice(self.callee.name, call, self.options)
        call, entry = self._calls.planned(callee, call)
        refuse_target(self.callee.name, entry.plan.hardware, self.options.device)
        if not entry.is_agreed:
            check_devices(entry.plan)
        if call.closed_over is not None:
            call = self._calls.placed(callee, call, entry)
        leaves, treedef = tree_util.tree_flatten(call.dynamic)
        refuse_shapes(self.callee.name, entry.plan, leaves)
        with progress(f"compiling {self.callee.name}", len(self._calls.entries) > known):
            if entry.captures or any(isinstance(leaf, Tracer) for leaf in leaves):
                if self.options.check and not entry.is_checked:
                    warn_of_tracers(self.callee.name)
                return finish(
                    callee, call, run_nested(self.callee.name, entry, call, leaves, treedef), entry.holds_static
                )
            CONCRETE.update(map(type, leaves))
            arrays = _arrays(call, entry, leaves, treedef)
            if (
                not entry.is_compiled and not is_traced()
            ):  # the trace around may be of what XLA cannot compile, as checks
                own, first = arrays, entry
                entry = self._calls.compiled(
                    callee, call, first, lambda e: own if e is first else _arrays(call, e, leaves, treedef)
                )
                arrays = own if entry.jitted is first.jitted else _arrays(call, entry, leaves, treedef)
            if not entry.is_agreed:
                entry = self._calls.entries.keep(self._calls.key(callee, call), agreed(entry), callee.root)
            if self.options.check and not entry.is_checked:
                entry = self._calls.entries.keep(self._calls.key(callee, call), checked(entry, leaves), callee.root)
            # A first state may arrive otherwise; what the call returns is sharded as planned.
            transfers_arrays = any(map(lies_elsewhere, leaves, entry.targets))
            result = entry.jitted(*arrays)
        has_keywords = any(s.keyword for s in call.slots)
        is_bound = call.ambient is not None and call.ambient.is_binding
        simple = not (call.stateful or call.returns_changes or entry.holds_static or has_keywords or is_bound)
        if simple and entry.is_compiled and self._calls.entries.kinds == 1 and not transfers_arrays:
            self._fast.open(entry)
        else:
            self._fast.close()
        return finish(callee, call, result, entry.holds_static)

    def _counted(self, callee: Callee, call: Call, entry: Entry) -> tuple[Counted, ...]:
        """What a run of the call counts."""
        if call.closed_over is not None:
            call = self._calls.placed(callee, call, entry)
        leaves, treedef = tree_util.tree_flatten(call.dynamic)
        refuse_shapes(self.callee.name, entry.plan, leaves)
        return counted_run(entry.plan, _arrays(call, entry, leaves, treedef))


_ATTRIBUTES = frozenset({"fn", "options", "callee", "_calls", "_fast", "_donates"})
"""The attributes of a sharded function itself."""


_HOLDING = "fget", "func", "__func__"
"""The attributes in which a property, a `functools.cached_property` and a class method hold their function."""


def _arrays(call: Call, entry: Entry, leaves: list[Any], treedef: Any) -> list[Any]:
    """The values of a call with its arrays transferred to the shardings of an entry where `jax.jit` would refuse them."""
    return call.replaced(treedef, moved(leaves, entry.targets, entry.replaced))

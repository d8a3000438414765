"""`shard`, `plan`, `explain`: the stages in a row, and the callable that `shard` returns."""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.sharding import NamedSharding

from shardfn import context, search
from shardfn.apply import apply, finest, has_other_grids, lies_elsewhere, moved, shardings, whole
from shardfn.callee import Callee, Slot, bind, describe, split
from shardfn.cost import hardware as hardware_
from shardfn.cost.hardware import Hardware
from shardfn.errors import ContextError, Problem, StrategyError, StrategyTypeError, fail, raise_problems
from shardfn.given import mesh_of
from shardfn.layout import Layout
from shardfn.make import make_plan
from shardfn.plan import Plan
from shardfn.progress import progress
from shardfn.report import Report, make_report
from shardfn.strategy import AUTO, Argument, Leaf, apply_parameter_plan, leaves_of, match, shape_of
from shardfn.trace import shaped, trace


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked for, as given to `shard`."""

    in_strategy: Any = None
    out_strategy: Any = None
    device: Any = None
    level: int = 0
    parameter_plan: Any = None
    search_mode: str | None = None
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()


def shard(
    fn: Callable[..., Any] | None = None,
    in_strategy: Any = None,
    out_strategy: Any = None,
    device: Any = None,
    level: int = 0,
    *,
    parameter_plan: dict[str, Any] | None = None,
    search_mode: str | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
) -> Any:
    """Shard a function from integers: how many ways each dimension of each argument is cut.

    Args:
      fn: any JAX function, method, module object or `functools.partial`; without it, a decorator is returned.
      in_strategy: a tuple with one entry for each positional argument (static ones have none), or None for AUTO
        throughout. An entry is a tuple with the number of pieces of each dim, None (data parallel: dim 0 over all
        devices where it divides, else whole), `AUTO`, a `Layout`, a `PartitionSpec`, a `NamedSharding`, or, for a
        pytree argument, a container of entries with its structure.
      out_strategy: the same for the results: always a tuple, with one entry for each element if the function returns a
        tuple, else with one entry. None leaves results to propagation.
      device: "CPU", "GPU", "TPU", a list of devices, a mesh, or a target to plan for ("tpu-v5e:4x8").
      level: what the search makes best: 0 most compute per byte communicated, 1 least memory per device, 2 least time.
      parameter_plan: entries by path glob, `{"params/layers/*/w1": (1, 4)}`; they win over `in_strategy`.
      search_mode: name of the search for what is left open (`search.MODES`); the context's if None.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as in `jax.jit`.

    Returns:
      A `ShardedFunction`. It plans on the first call with new shapes, and is an ordinary JAX function otherwise.

    Raises:
      ShardError: when called; all problems of a call at once, before anything is compiled.

    >>> import jax.numpy as jnp
    >>> dense = shard(lambda x, w: x @ w, ((1, 1), (1, 1)), ((1, 1),))
    >>> dense(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    options = Options(
        in_strategy, out_strategy, device, level, parameter_plan, search_mode,
        _ints(static_argnums), _names(static_argnames), _ints(donate_argnums), _names(donate_argnames),
    )  # fmt: skip
    if fn is None:
        return functools.partial(_sharded, options=options)
    return _sharded(fn, options)


def plan(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """Plan a call without running it; `args` may be `jax.ShapeDtypeStruct`s, and no device is needed.

    Keyword arguments that `shard` knows are options, the others go to `fn`.

    >>> import jax, jax.numpy as jnp
    >>> x, w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 2048), jnp.bfloat16)
    >>> made = plan(lambda x, w: x @ w, x, w, in_strategy=((16, 1), (1, 16)), device="tpu-v5e:16x16")
    >>> made.device_matrix, made.outputs[0].cuts
    ((16, 16), (16, 16))
    """
    function, rest = _with_options(fn, kwargs)
    return function.plan(*args, **rest)


def explain(fn: Callable[..., Any], *args: Any, compiled: bool = False, **kwargs: Any) -> Report:
    """The report of a call: grid, layouts and their reasons, collectives with file and line, memory, findings.

    `compiled=True` holds the prediction against what XLA compiled (which needs the devices). Other keyword arguments
    are as in `plan`.
    """
    function, rest = _with_options(fn, kwargs)
    return function.explain(*args, compiled=compiled, **rest)


def reshard(x: Any, layout: Layout) -> Any:
    """Lay an array out anew; inside a jitted function a constraint, outside a move.

    >>> import jax.numpy as jnp
    >>> reshard(jnp.ones((4, 2)), Layout((1,), ("dp",))("dp", "None")).shape
    (4, 2)

    Raises:
      StrategyTypeError: `x` is no array, or `layout` no Layout. LayoutError: it does not fit the array or the devices.
    """
    if shape_of(x) is None or not hasattr(x, "shape"):
        fail(StrategyTypeError, f"`reshard` takes an array, not a {type(x).__name__}", fix="pass a jax.Array")
    if not isinstance(layout, Layout):
        fail(StrategyTypeError, f"`reshard` takes a Layout, not a {type(layout).__name__}",
             where=f"layout = {layout!r}", fix='build one: Layout((2, 4), ("dp", "mp"))("dp", "None")')  # fmt: skip
    layout.slice_shape(x.shape)
    devices = jax.devices()
    if len(devices) == 1:
        return x
    sharding = layout.sharding(devices[: layout.size])
    if isinstance(x, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(x, sharding)
    return jax.device_put(x, sharding)


_OPTION_NAMES = tuple(f.name for f in dataclasses.fields(Options))


def _with_options(fn: Any, kwargs: dict[str, Any]) -> tuple[ShardedFunction, dict[str, Any]]:
    mine = {k: kwargs.pop(k) for k in _OPTION_NAMES if k in kwargs}
    if isinstance(fn, ShardedFunction):
        return (ShardedFunction(fn.fn, dataclasses.replace(fn.options, **mine)) if mine else fn), kwargs
    return shard(fn, **mine), kwargs


def _ints(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _sharded(fn: Callable[..., Any], options: Options) -> ShardedFunction:
    if not callable(fn):
        fail(StrategyTypeError, f"`shard` takes a function, not a {type(fn).__name__}", where=f"fn = {fn!r}",
             fix="pass the function first: shard(fn, in_strategy, out_strategy)")  # fmt: skip
    raise_problems(_option_problems(options))
    return ShardedFunction(fn, options)


def _option_problems(options: Options) -> list[Problem]:
    """What is wrong with the options whatever the function is."""
    problems: list[Problem] = []
    level = options.level
    if isinstance(level, bool) or not isinstance(level, int):
        problems.append(Problem(f"`level` must be an int, but it is a {type(level).__name__}", f"level = {level!r}",
                                fix=_LEVELS, is_type=True))  # fmt: skip
    elif level not in (0, 1, 2):
        problems.append(
            Problem(f"`level` is {level}, but there are only 0, 1 and 2", f"level = {level!r}", fix=_LEVELS)
        )
    for name in ("in_strategy", "out_strategy"):
        if getattr(options, name) is not None:
            match((), getattr(options, name), name, found := [])
            problems += [p for p in found if p.is_type]
    apply_parameter_plan((), options.parameter_plan, found := [])
    problems += [p for p in found if p.is_type]
    device = options.device
    if isinstance(device, bool | int | float):
        try:
            hardware_.resolve(device)
        except hardware_.DeviceTypeError as error:
            problems += error.problems
    if options.search_mode is not None:
        search.select(options.search_mode)
    return problems


_LEVELS = "0 for most compute per byte communicated, 1 for least memory per device, 2 for least time"


class OtherCall(Exception):
    """Raised while tracing: the jitted function at hand was planned for other shapes or static values."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One plan, compiled for the calls it fits."""

    plan: Plan
    slots: tuple[Slot, ...]
    jitted: Callable[..., Any]
    nested: Callable[..., Any]
    """The same for a call inside a transformation: on the finest grid, which all plans on these devices share, because
    `jit` cannot name a layout of its results that its first grid has no axes for."""
    targets: tuple[NamedSharding, ...]
    stateful: bool


class ShardedFunction:
    """What `shard` returns: call it like the function. `plan`, `explain` and `lower` say what a call would do."""

    def __init__(self, fn: Callable[..., Any], options: Options):
        self.fn = fn
        self.options = options
        self.callee: Callee = describe(fn)
        functools.update_wrapper(self, fn, updated=())
        self._entries: dict[Any, Entry] = {}
        self._methods: weakref.WeakKeyDictionary[Any, ShardedFunction] = weakref.WeakKeyDictionary()
        self._fast: Callable[..., Any] = _never
        self._fast_context: Any = None
        self._checked = False
        self._moves = False

    def __repr__(self) -> str:
        given = ", ".join(
            f"{f.name}={getattr(self.options, f.name)!r}"
            for f in dataclasses.fields(Options)
            if getattr(self.options, f.name) != f.default
        )
        return f"shard({self.callee.name}{', ' if given else ''}{given})"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a decorated method: bound to the instance, whose arrays become arguments where its kind is known."""
        if instance is None:
            return self
        try:
            found = self._methods.get(instance)
            if found is None:
                found = self._methods[instance] = ShardedFunction(types.MethodType(self.fn, instance), self.options)
        except TypeError:  # not hashable, or no weak references to it
            return ShardedFunction(types.MethodType(self.fn, instance), self.options)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The shapes need no check here: `jit` looks them up, and traces for new ones, which raises OtherCall.
        if (
            not kwargs
            and context.current() is self._fast_context
            and (not self._checked or _CONCRETE.issuperset(map(type, tree_util.tree_leaves(args))))
        ):
            try:
                return self._fast(*args)
            except (OtherCall, ValueError):
                pass
        return self._call(args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan of a call; arguments may be shapes.

        Raises:
          ShardError: all that is wrong with the call.
        """
        return self._entry(args, kwargs)[0].plan

    def explain(self, *args: Any, compiled: bool = False, **kwargs: Any) -> Report:
        """The report of a call; with `compiled`, beside what XLA made of it."""
        entry, values = self._entry(args, kwargs)
        executable = self._lower(entry, values).compile() if compiled else None
        return make_report(entry.plan, executable, self._arrivals(entry, values))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """`jax.stages.Lowered` of the sharded function; its `.compile()` is JAX's own."""
        return self._lower(*self._entry(args, kwargs))

    # ---- inside

    def _lower(self, entry: Entry, values: list[Any]) -> Any:
        jitted: Any = entry.jitted
        if entry.plan.hardware.is_here:
            return jitted.lower(*_shapes(values, entry.slots, entry.stateful))
        traced = jitted.trace(*_shapes(values, entry.slots, entry.stateful))
        return traced.lower(lowering_platforms=(entry.plan.hardware.platform,))

    def _arrivals(self, entry: Entry, values: list[Any]) -> tuple[str, ...]:
        leaves = tree_util.tree_leaves(_dynamic(values, entry.slots, entry.stateful))
        return tuple(
            f"{d.path} lies elsewhere ({leaf.sharding}) and is moved on arrival: {d.local_bytes:,} bytes per device"
            for d, leaf, target in zip(entry.plan.inputs, leaves, entry.targets, strict=True)
            if lies_elsewhere(leaf, target) and leaf.committed
        )

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = len(self._entries)
        entry, values = self._entry(args, kwargs)
        if not entry.plan.hardware.is_here:
            fail(StrategyError, f"`{self.callee.name}` is planned for {entry.plan.hardware.name}, which is not here",
                 where=f"device = {self.options.device!r}",
                 fix="use .plan(...) or .explain(...), or give a device of this machine to run on")  # fmt: skip
        leaves, treedef = tree_util.tree_flatten(_dynamic(values, entry.slots, entry.stateful))
        with progress(f"compiling {self.callee.name}", len(self._entries) > known):
            if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                return self._finish(entry, self._run_nested(entry, values, leaves, treedef))
            _CONCRETE.update(map(type, leaves))
            self._moves = self._moves or any(map(lies_elsewhere, leaves, entry.targets))
            result = entry.jitted(*_replaced(values, entry, treedef, moved(leaves, entry.targets)))
        simple = not entry.stateful and not any(s.keyword for s in entry.slots)
        if simple and len(self._entries) == 1 and not self._moves:
            self._checked = entry.plan.hardware.count > 1
            self._fast, self._fast_context = entry.jitted, context.current()
        else:
            self._fast, self._fast_context = _never, None
        return self._finish(entry, result)

    def _run_nested(self, entry: Entry, values: list[Any], leaves: list[Any], treedef: Any) -> Any:
        try:
            return entry.nested(*values)
        except ValueError as error:
            # An eager derivative carries concrete arrays, which may be committed to another layout.
            if "does not match the sharding" not in str(error) and "incompatible" not in str(error):
                raise
        put = [jax.device_put(leaf, target) for leaf, target in zip(leaves, entry.targets, strict=True)]
        return entry.nested(*_replaced(values, entry, treedef, put))

    def _finish(self, entry: Entry, result: Any) -> Any:
        if not entry.stateful:
            return result
        result, changed = result
        self.callee.write(changed)
        return result

    def _entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Entry, list[Any]]:
        """The entry of a call, made if it is the first of its shapes; and the values as its jitted function takes them."""
        slots, values = bind(
            self.callee.signature, args, kwargs,
            frozenset(self.options.static_argnums), frozenset(self.options.static_argnames),
        )  # fmt: skip
        state = self.callee.read()
        if self.callee.adapter is not None:
            values = [state, *values]
        stateful = self.callee.adapter is not None
        dynamic = _dynamic(values, slots, stateful)
        leaves, treedef = tree_util.tree_flatten(dynamic)
        statics = tuple(v for v, s in zip(values[stateful:], slots, strict=True) if s.is_static)
        current = context.current()
        key = (slots, treedef, tuple(map(_signature, leaves)), statics, current)
        try:
            entry = self._entries.get(key)
        except TypeError:
            bad = [s.name for s, v in zip(slots, values[stateful:], strict=True) if s.is_static and not _hashable(v)]
            fail(StrategyTypeError, f"static argument {', '.join(f'`{b}`' for b in bad)} cannot be hashed",
                 why="a static argument is part of what a compiled function is found by",
                 fix="pass a tuple, a string or a frozen dataclass there")  # fmt: skip
        if entry is None:
            with progress(f"planning {self.callee.name}"):
                entry = self._entries[key] = self._make(slots, values, stateful, current)
        return entry, values

    def _make(self, slots: tuple[Slot, ...], values: list[Any], stateful: bool, current: Any) -> Entry:
        options, callee = self.options, self.callee
        problems: list[Problem] = []
        inputs = self._input_leaves(slots, values, stateful, current, problems)
        hardware = self._hardware(inputs, current)
        raise_problems([p for p in problems if p.is_type and "not an array" in p.what])  # it cannot be traced
        statics = tuple(i + stateful for i, s in enumerate(slots) if s.is_static)
        shapes = _shapes(values, slots, stateful)
        expected = _call_signature(shapes, statics)

        def pure(*flat: Any) -> Any:
            if _call_signature(flat, statics) != expected:
                raise OtherCall
            state, rest = (flat[0], flat[1:]) if stateful else ({}, flat)
            args, kwargs = split(slots, rest)
            result, changed = callee.call(state, args, kwargs)
            return (result, changed) if stateful else result

        traced = trace(pure, shapes, statics, hardware.platform)
        result, changed = traced.results if stateful else (traced.results, {})
        outputs = _output_leaves(result, self._out_strategy(result, current), problems)
        state_paths = {leaf.path: i for i, leaf in enumerate(inputs)}
        made = make_plan(
            callee.name, inputs, [*outputs, *_changed_leaves(changed)], traced, hardware, options.level,
            search.select(options.search_mode or current.search_mode), problems,
            same_as={len(outputs) + i: state_paths[p] for i, p in enumerate(sorted(changed))},
        )  # fmt: skip
        donated = tuple(
            i + stateful
            for i, s in enumerate(slots)
            if not s.is_static and (s.declared in options.donate_argnums or s.name in options.donate_argnames)
        )
        jit = functools.partial(apply, made, pure, shapes, traced.results, statics, donated)
        fine = finest(made)
        nested = jit(fine)
        jitted = nested if has_other_grids(made, traced.grids) else jit(whole(made))
        if current.save_graphs:
            from shardfn.report import save_graphs

            save_graphs(made, current.save_graphs_path)
        return Entry(made, slots, jitted, nested, tuple(shardings(made.inputs, whole(made))), stateful)

    def _input_leaves(
        self, slots: tuple[Slot, ...], values: list[Any], stateful: bool, current: Any, problems: list[Problem]
    ) -> list[Leaf]:
        strategy = self.options.in_strategy
        positional: list[Argument] = []
        declared: list[int] = []
        late: list[Argument] = []
        for slot, value in zip(slots, values[stateful:], strict=True):
            if slot.is_static:
                continue
            if slot.declared is None:
                late.append(Argument(slot.name, f"argument `{slot.name}`", value))
            else:
                positional.append(Argument(slot.name, f"argument {len(positional)} `{slot.name}`", value))
                declared.append(slot.declared)
        if strategy is None and isinstance(current.dataset_strategy, tuple) and current.is_set("dataset_strategy"):
            strategy = (*current.dataset_strategy, *[AUTO] * (len(positional) - len(current.dataset_strategy)))
        if type(strategy) is tuple and len(strategy) != len(positional):
            strategy = _with_defaults(strategy, self.callee, self.options, declared)
        leaves = []
        if stateful:
            for path, value in sorted(values[0].items()):
                leaves.append(Leaf(path, f"`{path}` of {self.callee.name}", *(shape_of(value) or ((), "?"))))
        leaves += match(positional, strategy, "in_strategy", problems)
        for argument in late:
            leaves += leaves_of(argument, problems)
        return apply_parameter_plan(leaves, self.options.parameter_plan, problems)

    def _hardware(self, inputs: Sequence[Leaf], current: Any) -> Hardware:
        if current.is_set("parallel_mode") and current.parallel_mode in ("data_parallel", "hybrid_parallel"):
            fail(ContextError, f"`shard` has no meaning under parallel_mode={current.parallel_mode!r}",
                 where=f"parallel_mode = {current.parallel_mode!r}", why="that mode cuts no operator",
                 fix='set_auto_parallel_context(parallel_mode="semi_auto_parallel"), or leave parallel_mode unset')  # fmt: skip
        device = self.options.device
        mesh = mesh_of(inputs)
        if device is None and mesh is not None:
            device = mesh
        count = 1 if current.is_set("parallel_mode") and current.parallel_mode == "stand_alone" else current.device_num
        found = hardware_.resolve(device, count=count, default=current.device_target)
        current.rank_among(found.count)
        return found

    def _out_strategy(self, result: Any, current: Any) -> Any:
        """The user's, unless MindSpore's context overrides it with data parallel (whole under full_batch)."""
        given = self.options.out_strategy
        overridden = (
            given is not None
            and current.is_set("parallel_mode")
            and current.parallel_mode in ("semi_auto_parallel", "auto_parallel")
            and current.out_strategy_mode != "honour"
        )
        if not overridden:
            return given
        entries = _outer(result)
        whole = current.full_batch
        warnings.warn(
            f"out_strategy of `{self.callee.name}` is overridden with {'whole results' if whole else 'data parallel'}, "
            f"as MindSpore does under parallel_mode={current.parallel_mode!r}; to honour it: "
            'set_auto_parallel_context(out_strategy_mode="honour")',
            stacklevel=6,
        )
        return tuple(tree_util.tree_map(lambda s: (1,) * len(s.shape), e) if whole else None for e in entries)


def _never(*args: Any) -> Any:
    raise OtherCall


_CONCRETE: set[type] = set()
"""Types of array leaves that have been seen and are no tracers."""


def _replaced(values: list[Any], entry: Entry, treedef: Any, leaves: Sequence[Any]) -> list[Any]:
    """The arguments of a call with other arrays."""
    dynamic = iter(tree_util.tree_unflatten(treedef, leaves))
    fixed = int(entry.stateful)
    return [v if i >= fixed and entry.slots[i - fixed].is_static else next(dynamic) for i, v in enumerate(values)]


def _dynamic(values: Sequence[Any], slots: Sequence[Slot], stateful: bool) -> tuple[Any, ...]:
    return (*values[:stateful], *(v for v, s in zip(values[stateful:], slots, strict=True) if not s.is_static))


def _shapes(values: Sequence[Any], slots: Sequence[Slot], stateful: bool) -> list[Any]:
    return [
        v if i >= stateful and slots[i - stateful].is_static else tree_util.tree_map(shaped, v)
        for i, v in enumerate(values)
    ]


def _signature(leaf: Any) -> Any:
    try:
        return leaf.shape, leaf.dtype
    except AttributeError:
        return type(leaf)


def _call_signature(flat: Sequence[Any], statics: tuple[int, ...]) -> Any:
    dynamic = [v for i, v in enumerate(flat) if i not in statics]
    leaves, treedef = tree_util.tree_flatten(dynamic)
    return treedef, [shape_of(leaf) for leaf in leaves], [flat[i] for i in statics]


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _with_defaults(strategy: tuple[Any, ...], callee: Callee, options: Options, declared: list[int]) -> Any:
    """Entries of the arguments that were passed. Arguments with defaults may be left out of the call or the strategy."""
    if callee.signature is None:
        return strategy
    every = {
        i: p.default is not p.empty
        for i, p in enumerate(callee.signature.parameters.values())
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and i not in options.static_argnums
        and p.name not in options.static_argnames
    }
    required = [i for i, has_default in every.items() if not has_default]
    if not len(required) <= len(strategy) <= len(every) or any(i not in every for i in declared):
        return strategy
    entries = dict(zip(every, strategy, strict=False))
    return tuple(entries.get(i, AUTO) for i in declared)


def _outer(result: Any) -> tuple[Any, ...]:
    """The results that an out_strategy has entries for: a tuple's elements, or the one result."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _output_leaves(result: Any, strategy: Any, problems: list[Problem]) -> list[Leaf]:
    outer = _outer(result)
    single = not isinstance(result, tuple | list)
    arguments = [
        Argument("result" if single else f"result/{i}", "the output" if single else f"output {i}", value)
        for i, value in enumerate(outer)
    ]
    return match(arguments, strategy, "out_strategy", problems)


def _changed_leaves(changed: dict[str, Any]) -> list[Leaf]:
    return [
        Leaf(f"state/{path}", f"`{path}`", tuple(value.shape), str(value.dtype))
        for path, value in sorted(changed.items())
    ]

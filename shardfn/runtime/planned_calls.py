"""The calls of one sharded function: arguments bound, kinds told apart, and the entry that calls of a kind run with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardfn.errors import StrategyTypeError, fail
from shardfn.frontend import defaults
from shardfn.frontend.ambient_mesh import without_types
from shardfn.frontend.annotations import rules_in_force
from shardfn.frontend.arguments import Call, bind, missing_arguments
from shardfn.frontend.callee import Callee
from shardfn.frontend.closed_over import ClosesOverRef
from shardfn.frontend.options import OPTION_NAMES, Options
from shardfn.frontend.recorder import include, recording
from shardfn.frontend.refs import is_ref
from shardfn.frontend.static_leaves import hide_static
from shardfn.frontend.strategy import short
from shardfn.planning.call import closed_over_arguments, pure_function
from shardfn.runtime.agreement import CheckResult
from shardfn.runtime.check import with_agreement
from shardfn.runtime.executable import Entry, Results, compile_entry, make_entry, typed_as_planned
from shardfn.runtime.progress import progress
from shardfn.runtime.shared_entries import Kept


class PlannedCalls:
    """The calls of one sharded function, and by their kind what is kept of them.

    Args:
      callee: what is called.
      options: those of `shard`.
      kept: what is kept of calls; sharded functions of the same function with the same options share it.
    """

    def __init__(self, callee: Callee, options: Options, kept: Kept):
        self.callee, self.options = callee, options
        self.kept, self.entries, self.closed_over = kept, kept.entries, kept.closed_over
        self.results_of, self.is_shared = kept.results_of, kept.is_shared

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any], planned_by: str = "") -> tuple[Callee, Call]:
        """What is called, with the objects among the arguments; and the call as a jitted function takes it.

        Args:
          args: the positional arguments.
          kwargs: the keyword arguments.
          planned_by: the method that the user called, if it takes shapes as well as arrays.

        Raises:
          StrategyTypeError: the arguments do not fit the function's signature, or a static one cannot be hashed.
        """
        statics = frozenset(self.options.static_argnums), frozenset(self.options.static_argnames)
        try:
            slots, values = bind(self.callee.signature, args, kwargs, *statics)
        except TypeError as error:
            signature = short(f"{self.callee.name}{self.callee.signature}").strip("'")
            why, fix = "a call has the arguments of the function itself", f"call it as {signature}"
            if planned_by:
                parameters = signature.removeprefix(self.callee.name)
                why = f"`{planned_by}` takes the arguments of a call, or their shapes"
                fix = f'pass {parameters}, each an array or its shape: jax.ShapeDtypeStruct((8, 128), "float32")'
            if mine := {name: value for name, value in kwargs.items() if name in OPTION_NAMES}:
                options = ", ".join(f"{name}={short(value)}" for name, value in mine.items())
                fix = f"options of `shard` stand before the call: shard({self.callee.name}, {options})(...)"
            wrong = missing_arguments(self.callee.signature, args, kwargs) or error
            fail(StrategyTypeError, f"the arguments do not fit `{self.callee.name}`: {wrong}", where=signature,
                 why=why, fix=fix)  # fmt: skip
        donated = self.options.donate_argnums, self.options.donate_argnames
        callee, values = self.callee.of_call(slots, values, frozenset(s.name for s in slots if s.is_among(*donated)))
        values = [value if slot.is_static else hide_static(value) for slot, value in zip(slots, values, strict=True)]
        state = callee.read()
        stateful = bool(state)
        call = Call(slots, [state, *values] if stateful else values, stateful, stateful or callee.has_held)
        if problems := call.unhashable():
            raise StrategyTypeError(problems)
        call = call.in_place()
        is_argument = self.options.closed_over == "argument"
        return callee, self.with_closed_over(
            callee, call, is_argument
        ) if is_argument or self.closed_over.kinds else call

    def with_closed_over(self, callee: Callee, call: Call, is_traced: bool) -> Call:
        """The call with the arrays that the function closes over among its values, or refs only; `is_traced` says whether a call
        of a new kind is traced for them."""
        key = self.key(callee, call)
        found = self.closed_over.find(key, callee.root)
        if found is None and is_traced:
            only_refs = self.options.closed_over != "argument"
            found = self.closed_over.keep(key, closed_over_arguments(callee, call, only_refs), callee.root)
        return call.with_closed_over(found) if found is not None and found.arrays else call

    def planned(self, callee: Callee, call: Call) -> tuple[Call, Entry]:
        """A call as it is planned, with the refs that the function closes over among its values; and its entry."""
        try:
            return call, self.entry(callee, call)
        except ClosesOverRef:
            if call.closed_over is not None:
                raise
        call = self.with_closed_over(callee, call, True)
        return call, self.entry(callee, call)

    def keep_agreement(self, args: tuple[Any, ...], result: CheckResult) -> None:
        """Let the plan of a call say that a check of it found no difference."""
        callee, call = self.bound(args, {})
        call, entry = self.planned(callee, call)
        self.entries.keep(self.key(callee, call), with_agreement(entry, result), callee.root)

    def key(self, callee: Callee, call: Call) -> Any:
        """What calls of one kind share. Where settings name files, which may change, no other sharded function shares it."""
        current = defaults.current()
        own = self if self.is_shared and current.names_files else None
        return call.kind(), callee.fixed(), current, rules_in_force(), jax.dtypes.canonicalize_dtype(float), own

    def placed(self, callee: Callee, call: Call, entry: Entry) -> Call:
        """The call with the arrays that the function closes over in their planned shardings, where they then stay."""
        assert call.closed_over is not None
        targets = dict(zip((d.path for d in entry.plan.inputs), entry.targets, strict=True))
        kept = {path: a for path, a in call.closed_over.arrays.items() if not is_ref(a)}
        if all(getattr(a, "sharding", None) == targets[path] for path, a in kept.items()):
            return call
        own = call.without_closed_over()
        found = self.closed_over.keep(self.key(callee, own), call.closed_over.placed(targets), callee.root)
        return own.with_closed_over(found)

    def entry(self, callee: Callee, call: Call) -> Entry:
        """The entry of a call, made if it is the first of its kind."""
        current = defaults.current()
        key = self.key(callee, call)
        root = callee.root
        entry = self.entries.find(key, root) or typed_as_planned(self.entries, key, call.types, root)
        if entry is None:
            with progress(f"planning {self.callee.name}") as say:
                entry = self.entries.keep(key, make_entry(callee, self.options, call, current, say), root)
            self.entries.warn_of_variants(key, self.callee.name, root)
        include(entry.watch, root)
        return entry

    def results(self, callee: Callee, call: Call) -> Any:
        """The shapes of what a call returns, with what it changes where it does (`Call.returns_changes`). It is traced if no call
        of its kind was, and not planned."""
        key, root = self.key(callee, call), callee.root
        entry = self.entries.find(key, root)
        found = self.results_of.find(key, root) if entry is None else entry.results
        if found is None:
            shapes = call.of_shapes()
            with (
                recording(root, callee.name, callee.objects_of(call)) as read,
                without_types(call.ambient, callee.name),
            ):
                traced = jax.jit(pure_function(callee.frozen(shapes), shapes), static_argnums=call.statics).trace(
                    *shapes.values
                )
            found = self.results_of.keep(key, Results.of(traced.jaxpr, traced.out_info, read()), root)
        include(found.watch, root)
        return found.shapes

    def compiled(self, callee: Callee, call: Call, entry: Entry, values: Callable[[Entry], Sequence[Any]]) -> Entry:
        """The entry of a call after it was compiled, which may change its plan (`compile_entry`)."""
        if not entry.is_compiled:
            entry = self.entries.keep(self.key(callee, call), compile_entry(entry, values), callee.root)
        return entry

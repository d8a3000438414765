"""Strategy entries (tuples, None, AUTO, Layouts, specs), matched with the arrays of a call.

A strategy is a pytree prefix: one entry for each positional argument, and for a pytree argument an entry may be a
container with the same keys. All problems are collected here and raised by the caller.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import tree_util
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec

from shardfn.errors import Problem, a, closest
from shardfn.frontend.meant_entries import is_device, meant
from shardfn.frontend.meshes import MeshLayout, partition_spec
from shardfn.frontend.paths import array_paths, join


class NamedEntry:
    """The type of `AUTO`, `REPLICATED` and `DATA_PARALLEL`. Copying and pickling keep their identity."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name


AUTO = NamedEntry("AUTO")
"""Leaves the sharding of an array to the search; within a tuple, as in `(4, AUTO)`, that of one dimension."""

REPLICATED = NamedEntry("REPLICATED")
"""Replicates an array of any rank, or each array of a subtree."""

DATA_PARALLEL = NamedEntry("DATA_PARALLEL")
"""Shards dimension 0 over all devices where it divides, and replicates other arrays; `None` means the same."""

Entry = Any
"""tuple of ints and AUTO | None | AUTO | REPLICATED | DATA_PARALLEL | Layout | PartitionSpec | NamedSharding | Format of one"""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a call, or of its result, and what was said about it."""

    path: str
    """`params/layers/0/w1`; the first part is the argument's name."""
    label: str
    """How an error speaks of it: "argument 1 `w1`"."""
    shape: tuple[int, ...]
    dtype: str
    entry: Entry = AUTO
    where: str = ""
    """Where the entry stands: `in_strategy[1]`, `parameter_plan['w1']`."""
    by: str = "you"
    """Who wrote the entry: "you", "file", or "mode"."""
    completes: Leaf | None = None
    """The same with the entry as it was written, where the search has fixed its open dimensions."""

    @property
    def text(self) -> str:
        """`w1: float32[30, 64]`."""
        return f"{self.path}: {self.dtype}{list(self.shape)}"

    @property
    def source(self) -> str:
        """Where the entry stands, with the entry and the array."""
        entry = partition_spec(self.entry.spec) if type(self.entry) is MeshLayout else self.entry
        return f"{self.where} = {entry!r}, {self.text}" if self.where else self.text


@dataclasses.dataclass(frozen=True)
class ModeEntry:
    """An entry that a parallel mode gives an array, where the user wrote none; `mode` says which, for reports."""

    entry: Entry
    mode: str


@dataclasses.dataclass(frozen=True)
class Argument:
    """One positional argument: its name, how errors speak of it, and its value (arrays or their shapes)."""

    name: str
    label: str
    value: Any


def shape_of(leaf: Any) -> tuple[tuple[int, ...], str] | None:
    """Shape and dtype of anything JAX takes as an array; None for what it does not.

    >>> shape_of(np.zeros((2, 3), np.int32)), shape_of(1.0), shape_of("text")
    (((2, 3), 'int32'), ((), 'float32'), None)
    """
    if isinstance(leaf, bool | int | float | complex):
        return (), str(
            jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", type(leaf)))
        )  # `jax.vjp` gives ints a dtype
    if not isinstance(leaf, jax.Array) and isinstance(leaf, jax.Ref):  # the first is the cheap one
        return None
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None or dtype == np.dtype(object) or has_symbols(shape):
        return None
    if isinstance(dtype, np.dtype) and dtype.kind in "USMmV" and not jax.numpy.issubdtype(dtype, np.number):
        return None
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        return None
    if isinstance(dtype, np.dtype):  # what JAX makes of it: NumPy's float64 arrives as float32 unless x64 is on
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return tuple(int(d) for d in shape), str(dtype)


def has_symbols(shape: tuple[Any, ...]) -> bool:
    """Whether a shape has symbolic dimensions (`jax.export.symbolic_shape`)."""
    return not all(isinstance(d, int | np.integer) for d in shape)


def is_of_numbers(value: Any) -> bool:
    """Whether a value is a list or a tuple, nested or not, of Python's numbers alone.

    >>> is_of_numbers([[1.0, 2.0]]), is_of_numbers((16, 32)), is_of_numbers([]), is_of_numbers([{"a": 1}])
    (True, True, False, False)
    """
    if not isinstance(value, list | tuple):
        return False
    leaves = tree_util.tree_leaves(value, is_leaf=lambda node: not isinstance(node, list | tuple))
    return bool(leaves) and all(isinstance(leaf, bool | int | float | complex) for leaf in leaves)


def fix_of_numbers(name: str, value: Any) -> str:
    """What to pass in the place of a list of numbers, which may be meant as a shape."""
    if all(type(n) is int and n > 0 for n in value):
        return f"for an array of that shape write jax.ShapeDtypeStruct({tuple(value)}, 'float32'), or an array"
    return f"pass an array: jnp.asarray({name})"


UNKNOWN = "?"
"""The dtype of a leaf that is no array."""


def leaves_of(argument: Argument, problems: list[Problem]) -> list[Leaf]:
    """The arrays of an argument in pytree order; what is no array becomes a problem."""
    found = []
    paths = array_paths(argument.name, argument.value)
    for path, (key, value) in zip(paths, tree_util.tree_flatten_with_path(argument.value)[0], strict=True):
        shape = shape_of(value)
        if shape is None:
            problems.append(_not_an_array(argument, path, value, nested=bool(key)))
            shape = ((), UNKNOWN)
        label = argument.label if not key else f"{argument.label} at `{path}`"
        found.append(Leaf(path, label, *shape))
    return found


CELL = "__shardfn_cell__"
"""Class attribute that marks a `Cell`, a plain object whose attributes hold arrays."""


def is_cell(value: Any) -> bool:
    """Whether an object is a `Cell`."""
    return getattr(type(value), CELL, False)


def _not_an_array(argument: Argument, path: str, value: Any, nested: bool) -> Problem:
    if isinstance(value, jax.ShapeDtypeStruct) and has_symbols(value.shape):
        return Problem(f"{argument.label} has symbolic dimensions", f"{path} = {short(value)}",
                       "a plan is for sizes: these say which numbers of shards divide, and what a call costs",
                       "give numbers, and plan and export the function once for each shape", is_type=True)  # fmt: skip
    if isinstance(value, np.ndarray):
        fix = "convert it to a dtype that JAX has, such as float32, or leave it out of the call"
    elif isinstance(value, jax.Ref):
        fix = "pass an array, and return the changed one; a ref that the function makes inside works"
    elif isinstance(value, Iterator):
        fix = f"pass a tuple: tuple({argument.name if argument.name.isidentifier() else 'it'})"
    elif is_cell(value):
        fix = ("shard the Cell itself, as in shard(cell) or cell.shard(...); or pass its arrays, cell.parameters_dict(), and "
               "call cell.with_parameters(arrays) in the function")  # fmt: skip
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        registered = f"jax.tree_util.register_dataclass({type(value).__name__}, data_fields=[...], meta_fields=[...])"
        fix = f"make it a pytree, with its arrays as data: {registered}; one without arrays may be static (static_argnames)"
    elif nested and callable(value):
        fix = ("close over it, and give the arrays alone; of an Equinox module, arrays, rest = "
               f"eqx.partition({argument.name if argument.name.isidentifier() else 'model'}, eqx.is_array) parts them, and in "
               "the function eqx.combine(arrays, rest) is the module again")  # fmt: skip
    elif nested:
        fix = "take it out of that argument: close over it, or pass it as a static argument of its own"
    elif argument.name.isidentifier():
        fix = f"make it static, then it has no entry: static_argnames={argument.name!r}"
    else:
        fix = "make it static with static_argnums, then it has no entry"
    kind = (
        "a function" if callable(value) and type(value).__module__.startswith("jax") else a(value)
    )  # a custom_jvp, say
    what = f"{argument.label} holds {kind} at `{path}`" if nested else f"{argument.label} is {kind}"
    if isinstance(value, np.ndarray):
        what += f" of dtype {value.dtype}"
    return Problem(f"{what}, which JAX does not take as an array", f"{path} = {short(value)}",
                   "only arrays and numbers can be sharded", fix, is_type=True)  # fmt: skip


def match(
    arguments: Sequence[Argument],
    strategy: Any,
    name: str,
    problems: list[Problem],
    keyword_only: Sequence[Argument] = (),
) -> list[Leaf]:
    """Give every array of `arguments` its entry from `strategy` (`in_strategy` or `out_strategy`, called `name`).

    `strategy` None leaves all of them AUTO. The number of entries must be the number of arguments; `keyword_only` are
    arguments of the call that have none.
    """
    per_argument = [leaves_of(a, problems) for a in arguments]
    if strategy is not None and (problem := _misfit(arguments, strategy, name, keyword_only)):
        problems.append(problem)
        strategy = None
    if strategy is None:
        return [leaf for leaves in per_argument for leaf in leaves]
    found: list[Leaf] = []
    for i, (argument, leaves, entry) in enumerate(zip(arguments, per_argument, strategy, strict=True)):
        where = entry.where if isinstance(entry, PassedOn) else f"{name}[{i}]"
        entry = entry.entry if isinstance(entry, PassedOn) else entry
        if type(entry) is tuple and entry and set(map(type, entry)) == {int} and is_of_numbers(argument.value):
            problems.append(Problem(f"{argument.label} is {a(argument.value)} of numbers, not an array",
                                    f"{argument.name} = {short(argument.value)}, {where} = {entry!r}",
                                    "it is a pytree of scalars, which have no dimension to shard",
                                    fix_of_numbers(argument.name, argument.value), is_type=True))  # fmt: skip
            entry = AUTO
        entries = _spread(entry, argument.value, where, argument.label, problems)
        found += [with_entry(leaf, e, w) for leaf, (e, w) in zip(leaves, entries, strict=True)]
    return found


@dataclasses.dataclass(frozen=True)
class PassedOn:
    """An entry that a function of this library passes on to `shard`; `where` is where the user wrote it: `in_strategy[0]`."""

    entry: Any
    where: str


def not_a_tuple(strategy: Any, name: str, arguments: Sequence[str] = ()) -> Problem | None:
    """The problem of a strategy that is no tuple; `arguments`: the names of those that have entries, where they are known."""
    if isinstance(strategy, tuple) and not isinstance(strategy, PartitionSpec):
        return None
    kind = strategy if isinstance(strategy, NamedEntry) else a(strategy)
    return Problem(f"`{name}` must be a tuple with one entry for each {_NOUN[name]}, but it is {kind}",
                   f"{name} = {short(strategy)}", _COUNTS[name], _as_tuple(strategy, name, arguments), is_type=True)  # fmt: skip


def _misfit(
    arguments: Sequence[Argument], strategy: Any, name: str, keyword_only: Sequence[Argument] = ()
) -> Problem | None:
    """The problem of a strategy that is no tuple, or has another number of entries than there are arguments."""
    noun = _NOUN[name]
    if problem := not_a_tuple(strategy, name, [argument.name for argument in arguments]):
        return problem
    if len(strategy) == len(arguments):
        return None
    entries, wanted = count(len(strategy), "entry", "entries"), count(len(arguments), noun, noun + "s")
    names = ", ".join(argument.name for argument in arguments) or "none"
    late = keyword_only if len(arguments) < len(strategy) <= len(arguments) + len(keyword_only) else ()
    fix = _by_path(strategy, len(arguments), late, name) if late else _fix_count(strategy, arguments, name)
    return Problem(
        f"`{name}` has {entries} for {wanted}", f"{name} = {short(strategy)}; {noun}s: {names}", _COUNTS[name], fix
    )


_NOUN = {"in_strategy": "argument", "out_strategy": "output", "dataset_strategy": "argument",
         "strategy": "input", "context.dataset_strategy": "input"}  # fmt: skip
_COUNTS = {
    "in_strategy": "each positional argument has one entry, a pytree too; static and keyword-only ones have none",
    "out_strategy": "each element of a returned tuple has one entry; any other result is one output",
    "dataset_strategy": "without an in_strategy, the first arguments of the function are the inputs of the data set",
    "strategy": "each input of the source has one entry, a pytree too",
    "context.dataset_strategy": "each input of the source has one entry, a pytree too",
}


def count(n: int, one: str, many: str) -> str:
    """`n` with its noun."""
    return f"{n} {one if n == 1 else many}"


def _fix_count(strategy: tuple[Any, ...], arguments: Sequence[Argument], name: str) -> str:
    if is_entry(strategy) and strategy and len(arguments) == 1:
        return f"write {name}=({strategy!r},): the outer tuple counts {_NOUN[name]}s"
    if not arguments:
        return f"leave {name} out, or write {name}=()"
    is_searched = name in ("in_strategy", "out_strategy")  # data is read before any search
    other, means = (AUTO, "which leaves the choice to the library") if is_searched else (None, "which is data parallel")
    own, missing = name.rpartition(".")[2], len(arguments) - len(strategy)
    if is_entry(strategy) and strategy:
        return f"write one entry for each {_NOUN[name]}: {own}={short((strategy, *[other] * (len(arguments) - 1)))}"
    if missing > 0:
        return (f"add {count(missing, 'entry', 'entries')}, for instance {other}, {means}: "
                f"{own}={short((*strategy, *[other] * missing))}")  # fmt: skip
    return f"remove {count(-missing, 'entry', 'entries')}"


def _by_path(strategy: tuple[Any, ...], positional: int, late: Sequence[Argument], name: str) -> str:
    """The fix of a strategy with entries for keyword-only arguments too, in their order."""
    given, rest = strategy[:positional], strategy[positional:]
    paths = [one.name if tree_util.all_leaves([one.value]) else f"{one.name}/*" for one in late]
    entries = {path: AUTO if not is_entry(entry) else entry for path, entry in zip(paths, rest, strict=False)}
    are = "is keyword-only: give its entry" if len(rest) == 1 else "are keyword-only: give their entries"
    names = " and ".join(f"`{one.name}`" for one in late[: len(rest)])
    return f"{names} {are} by path: {name}={short(given)}, parameter_plan={short(entries)}"


def _as_tuple(strategy: Any, name: str, arguments: Sequence[str] = ()) -> str:
    noun, word = _NOUN[name], meant(strategy) if isinstance(strategy, str) else ""
    if name == "in_strategy" and (strategy is AUTO or word == "AUTO"):
        return f"leave {name} out: then all of it is AUTO"
    if isinstance(strategy, list) and not is_device(strategy):
        return f"write {name}={short(tuple(tuple(e) if isinstance(e, list) else e for e in strategy))}"
    if isinstance(strategy, dict):
        return _of_dict(strategy, name, arguments)
    if is_device(strategy):
        return f"devices are an option of their own: device={short(strategy)}"
    if isinstance(strategy, NamedEntry | MeshLayout | PartitionSpec | jax.sharding.Sharding):
        word = repr(strategy)
    if word:
        return f"write {name}=({word},), with one entry for each {noun}"
    entries = ["(4, 1)"] * max(1, len(arguments))
    return f"write a tuple with one entry for each {noun}, such as {name}=({', '.join(entries)}{',' * (len(entries) == 1)})"


def _of_dict(strategy: dict[Any, Any], name: str, arguments: Sequence[str]) -> str:
    """The fix of a dict in the place of a tuple: entries by argument, of the one result, or by the paths of arrays."""
    if _NOUN[name] == "output":
        return f"write {name}=({short(strategy)},): the outer tuple counts {_NOUN[name]}s, and a dict is one"
    entries = {key: tuple(e) if isinstance(e, list) else e for key, e in strategy.items() if isinstance(key, str)}
    named = {key: key if key in arguments else _close(key, arguments) for key in entries}
    if len(entries) == len(strategy) and None not in named.values() and len({*named.values()}) == len(strategy):
        by_name = {named[key]: entry for key, entry in entries.items()}
        ordered = tuple(by_name.get(argument, AUTO) for argument in arguments)
        return f"write the entries in the order of the {_NOUN[name]}s: {name}={short(ordered)}"
    if name == "in_strategy" and len(entries) == len(strategy) and all(map(is_entry, entries.values())):
        return f"entries by path are a parameter_plan: write parameter_plan={short(entries)}"
    return f"write a tuple with one entry for each {_NOUN[name]}, such as {name}=((4, 1), None)"


def is_entry(entry: Any) -> bool:
    """Whether `entry` speaks of one array (and is spread over a subtree), rather than holding entries itself."""
    if entry is None or isinstance(entry, NamedEntry | MeshLayout | PartitionSpec | jax.sharding.Sharding):
        return True
    if type(entry) is tuple:
        return has_open_dims(entry) or not any(
            isinstance(e, NamedEntry | MeshLayout | PartitionSpec | jax.sharding.Sharding)
            or not tree_util.all_leaves([e])
            for e in entry
        )
    return not isinstance(entry, tuple | list | dict) and tree_util.all_leaves([entry])


def has_open_dims(entry: Any) -> bool:
    """Whether `entry` gives some dimensions of an array and leaves others to the search.

    >>> has_open_dims((4, AUTO)), has_open_dims((AUTO, AUTO)), has_open_dims((4, 1))
    (True, False, False)
    """
    if type(entry) is not tuple or not any(e is AUTO for e in entry):
        return False
    given = [e for e in entry if e is not AUTO]
    return bool(given) and all(isinstance(e, int | np.integer) for e in given)


def without_mesh(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """The leaves of a call without a mesh: there, a `PartitionSpec` that names no axis means REPLICATED."""
    return tuple(
        dataclasses.replace(leaf, entry=(1,) * len(leaf.shape))
        if isinstance(leaf.entry, PartitionSpec) and not any(leaf.entry) and len(leaf.entry) <= len(leaf.shape)
        else leaf
        for leaf in leaves
    )


def with_entry(leaf: Leaf, entry: Entry, where: str) -> Leaf:
    """The leaf with an entry that somebody wrote; a named one becomes what it stands for."""
    if isinstance(entry, ModeEntry):
        return dataclasses.replace(with_entry(leaf, entry.entry, entry.mode), by="mode")
    if entry is REPLICATED:
        entry = (1,) * len(leaf.shape)
    if isinstance(entry, Format) and entry.layout is None and entry.sharding is not None:
        entry = entry.sharding
    return dataclasses.replace(leaf, entry=None if entry is DATA_PARALLEL else entry, where=where, by="you")


def _children(tree: Any) -> list[tuple[str, Any]]:
    flat = tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[0]
    return [(join("", key), child) for key, child in flat]


def _spread(entry: Any, tree: Any, where: str, label: str, problems: list[Problem]) -> list[tuple[Entry, str]]:
    """One (entry, where) for every leaf of `tree`."""
    count = len(tree_util.tree_leaves(tree))
    if is_entry(entry):
        if not count and where.startswith("out_strategy") and entry not in (None, AUTO, REPLICATED, DATA_PARALLEL, ()):
            problems.append(Problem(f"{label} holds no array, but it has an entry",
                                    f"{where} = {short(entry)}, {label.removeprefix('the ')}: {short(tree)}",
                                    "an entry without an array has no effect",
                                    f"write AUTO there, or return the array: {where} = AUTO"))  # fmt: skip
        return [(entry, where)] * count
    if tree_util.all_leaves([tree]) and count == 1:
        if type(entry) is tuple and entry and all(e is AUTO for e in entry):
            return [(AUTO if len(entry) == len((shape_of(tree) or ((), UNKNOWN))[0]) else entry, where)]
        what = f"{label} is one array, but its entry is {a(entry)} of entries"
        code = meant(entry, len((shape_of(tree) or ((), UNKNOWN))[0]))
        if isinstance(entry, tuple) and None in entry and all(n is None or isinstance(n, int) for n in entry):
            what, whole = f"the entry of {label} has None for a dimension", repr(_flat_ints(entry, tree))
            opened = f"({', '.join('AUTO' if n is None else str(n) for n in entry)}{',' * (len(entry) == 1)})"
            code = f"{opened}, or {whole} where the dimension is not to be sharded"
        problems.append(Problem(f"the entry of {label} is a list" if isinstance(entry, list) else what,
                                f"{where} = {short(entry)}, {_array_text(tree)}",
                                "the entry of an array is a flat tuple of ints, in which AUTO leaves a dimension to the search",
                                f"write {where} = {code_in_fix(code or repr(_flat_ints(entry, tree)))}",
                                is_type=True))  # fmt: skip
        return [(AUTO, where)]
    mine, theirs = dict(_children(tree)), dict(_children(entry))
    wrong = [k for k in theirs if k not in mine] + [k for k in mine if k not in theirs]
    if wrong:
        problems.append(Problem(f"{label} and its entry differ in structure",
                                f"{where} has {', '.join(theirs) or 'nothing'}; the arrays are {', '.join(mine) or 'none'}",
                                "; ".join(_mismatch(k, mine) for k in wrong[:4]),
                                _fix_structure(tree, mine, theirs, where)))  # fmt: skip
        return [(AUTO, where)] * count
    spread: list[tuple[Entry, str]] = []
    for key, child in mine.items():
        step = key if isinstance(tree, list | tuple) and key.isdigit() else repr(key)
        spread += _spread(theirs[key], child, f"{where}[{step}]", label, problems)
    return spread


def _mismatch(key: str, mine: dict[str, Any]) -> str:
    if key in mine:
        return f"{key!r} has no entry"
    close = _close(key, mine)
    return f"there is no {key!r}" + (f" (did you mean {close!r}?)" if close else "")


def _close(key: str, keys: Iterable[str]) -> str | None:
    return next(iter(closest(key, keys)), None)


def _array_text(array: Any) -> str:
    shape, dtype = shape_of(array) or ((), UNKNOWN)
    return f"{dtype}{list(shape)}" if dtype != UNKNOWN else short(array)


def _fix_structure(tree: Any, mine: dict[str, Any], theirs: dict[str, Any], where: str) -> str:
    if type(tree) is not dict or len(mine) > 8:
        return "give one entry for all of it, or one for each of these keys; AUTO leaves a key open"
    close = {k: _close(k, [t for t in theirs if t not in mine]) for k in mine}
    entries = {k: theirs.get(k, theirs.get(close[k] or "", AUTO)) for k in mine}
    return f"give every key an entry, AUTO leaves it open: {where} = {short(entries)}"


def code_in_fix(code: str) -> str:
    """The code of an entry in a fix, with what a reader may not know of it.

    >>> code_in_fix("P('dp')"), code_in_fix("AUTO"), code_in_fix("(4, 1)")
    ("P('dp'), a jax.sharding.PartitionSpec on the mesh of device=", 'AUTO, of shardfn, without quotes', '(4, 1)')
    """
    if code.startswith("P("):
        return f"{code}, a jax.sharding.PartitionSpec on the mesh of device="
    return f"{code}, of shardfn, without quotes" if code in ("AUTO", "REPLICATED", "DATA_PARALLEL") else code


def _flat_ints(entry: Any, array: Any) -> Any:
    """`entry` as a tuple of ints for `array`, as close to it as the rank allows."""
    known = shape_of(array)
    flat = [e if type(e) is int and e > 0 else 1 for e in tree_util.tree_leaves(entry, is_leaf=lambda e: e is None)]
    return fitting(flat, known[0]) if known else tuple(flat)


def fitting(strategy: Sequence[int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """`strategy` at the rank of `shape`, with 1 where a number does not divide its dimension."""
    padded = [*strategy, *[1] * len(shape)][: len(shape)]
    return tuple(int(c) if c > 0 and n % c == 0 else 1 for c, n in zip(padded, shape, strict=True))


def short(value: Any, limit: int = 100) -> str:
    """`repr` on one line, truncated at `limit` characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


ENTRY_KINDS = (
    "an entry is a tuple of ints, AUTO, REPLICATED, DATA_PARALLEL, None, a PartitionSpec, a NamedSharding or a Layout"
)

"""Stack and scan repeated layers of an unrolled loss.

JAX traces, partitions and compiles a Python loop over 24 layers 24 times, with 24 times the collectives. Where the layers
differ only in the parameters they read, `scan_layers` keeps one and scans it over the stacked parameters.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util
from jax.core import Tracer
from jax.extend import core

from shardfn.errors import Problem, raise_problems
from shardfn.frontend.paths import join, tidy
from shardfn.frontend.strategy import short
from shardfn.ir.rewrite import bind_one, equation_line
from shardfn.train.flat_jaxpr import FlatEquation, FlatJaxpr
from shardfn.train.scan_layers.repeated_blocks import BlockRun, find_runs, flatten_for_blocks, tokens

DEFAULT_LIMIT = 1000
"""The largest number of blocks in one scan, that of MindSpore's `MS_COMM_COMPILER_OPT=-1`."""


@dataclasses.dataclass(frozen=True)
class StackedGroup:
    """Parameters that are stacked: the same parameter of each block."""

    name: str
    """Their path, with "*" for the part that differs."""
    members: tuple[int, ...]
    """Positions among the leaves."""


@dataclasses.dataclass(frozen=True)
class ScannedRun:
    """Blocks that became one scan."""

    count: int
    equations: int
    """Equations in one block."""
    names: tuple[str, ...]
    """The stacked parameters that it reads."""

    def __str__(self) -> str:
        return f"{self.count} blocks of {self.equations} equations are scanned: {', '.join(self.names)}"


@dataclasses.dataclass(frozen=True)
class ScannedLoss:
    """A loss with its repeated layers scanned; `scan_layers` makes it."""

    loss: Callable[..., Any]
    """`(stacked parameters, *batch) -> loss`."""
    stack: Callable[[Any], dict[str, Any]]
    """Parameters to stacked parameters, a dict by path."""
    unstack: Callable[[Mapping[str, Any]], Any]
    """The inverse of `stack`."""
    runs: tuple[ScannedRun, ...]
    diagnostics: tuple[str, ...]
    """Why layers that look alike were not scanned."""
    groups: tuple[StackedGroup, ...]

    def explain(self) -> str:
        """Which layers are scanned; which are not, and why."""
        return "\n".join([*(map(str, self.runs) if self.runs else ["no layers are scanned"]), *self.diagnostics])


def scan_limit(reuse: Any) -> int | None:
    """The largest number of blocks in one scan; None for no scan.

    Args:
      reuse: None or False for no scan; "auto", True or -1 for the default limit; or a positive int. Numbers may be text,
        as in `reuse=os.environ.get("MS_COMM_COMPILER_OPT")`.

    Raises:
      StrategyError, StrategyTypeError: anything else.

    >>> scan_limit("auto"), scan_limit(-1), scan_limit("12"), scan_limit(None)
    (1000, 1000, 12, None)
    """
    raise_problems(list(reuse_problems(reuse)))
    if reuse is None or reuse is False:
        return None
    number = -1 if reuse is True or reuse == "auto" else int(reuse)
    return DEFAULT_LIMIT if number == -1 else number


def reuse_problems(reuse: Any) -> Iterator[Problem]:
    """What is wrong with `reuse`."""
    if reuse is None or isinstance(reuse, bool) or reuse == "auto":
        return
    number = int(reuse) if isinstance(reuse, str) and re.fullmatch(r"-?[0-9]+", reuse) else reuse
    if not isinstance(number, int) or (number != -1 and number < 1):
        yield Problem(f"`reuse` cannot be {short(number)}", f"reuse = {short(number)}",
                      "it is the largest number of blocks in one scan", 'write "auto", -1 (1000) or a positive int',
                      is_type=not isinstance(number, int | str))  # fmt: skip


def scan_layers(
    loss_fn: Callable[..., Any], params: Any, *batch: Any, limit: int = DEFAULT_LIMIT, recomputed: int = 0
) -> ScannedLoss:
    """Stack and scan the repeated layers of a loss function.

    Args:
      loss_fn: `(params, *batch) -> anything`; it is traced.
      params: a pytree of arrays or shapes.
      *batch: arrays or shapes. The scanned loss is traced anew for others.
      limit: the largest number of blocks in one scan.
      recomputed: how many blocks of each run, the first ones, the backward pass rematerialises.

    Returns:
      The scanned loss. If no layer repeats, it is `loss_fn` on a dict of the same arrays.

    >>> import jax.numpy as jnp
    >>> def loss(params, x):
    ...     for layer in params["layers"]:
    ...         x = jnp.tanh(x @ layer["w"])
    ...     return x.sum()
    >>> params = {"layers": [{"w": jnp.full((3, 3), i / 9.0)} for i in range(4)]}
    >>> scanned = scan_layers(loss, params, jnp.ones((2, 3)))
    >>> print(scanned.explain())
    4 blocks of 2 equations are scanned: layers/*/w
    >>> scanned.stack(params)["layers/*/w"].shape
    (4, 3, 3)
    >>> bool(jnp.allclose(scanned.loss(scanned.stack(params), jnp.ones((2, 3))), loss(params, jnp.ones((2, 3)))))
    True
    """
    keyed, treedef = tree_util.tree_flatten_with_path(params)
    paths = [tidy(join("", key)) for key, _ in keyed]
    shapes = [(tuple(x.shape), str(x.dtype)) for _, x in keyed]
    trace = _tracer(loss_fn)
    flat, found, _ = trace(params, batch)
    groups = _groups(found, paths, shapes)
    place = {member: (group.name, j) for group in groups for j, member in enumerate(group.members)}

    def stack(params: Any) -> dict[str, Any]:
        leaves = treedef.flatten_up_to(params)
        rest = {path: leaf for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)) if i not in place}
        return rest | {group.name: _stacked([leaves[i] for i in group.members]) for group in groups}

    def leaf_of(stacked: Mapping[str, Any], i: int) -> Any:
        if i not in place:
            return stacked[paths[i]]
        name, j = place[i]
        return stacked[name][j]

    def unstack(stacked: Mapping[str, Any]) -> Any:
        return tree_util.tree_unflatten(treedef, [leaf_of(stacked, i) for i in range(len(paths))])

    def loss(stacked: Mapping[str, Any], *batch: Any) -> Any:
        traced: list[Any] = []  # from values, not shapes: in a shard_map they tell what varies between devices
        jax.eval_shape(lambda values: traced.extend(trace(unstack(values), batch)), dict(stacked))
        flat, runs, structure = traced
        stacks = {group.members: stacked[group.name] for group in groups}
        inputs = [lambda i=i: leaf_of(stacked, i) for i in range(len(paths))]
        inputs += [lambda x=x: x for x in tree_util.tree_leaves(batch)]
        return tree_util.tree_unflatten(structure, _evaluate(flat, runs, inputs, stacks, limit, recomputed))

    reports = [
        ScannedRun(run.count, run.period, tuple(g.name for g in groups if g.members in _slots(run))) for run in found
    ]
    diagnostics = tuple(_not_scanned(flat, groups, paths, shapes))
    return ScannedLoss(loss, stack, unstack, tuple(one for one in reports if one.names), diagnostics, groups)


def _tracer(loss_fn: Callable[..., Any]) -> Callable[[Any, Any], tuple[FlatJaxpr, list[BlockRun], Any]]:
    """From parameters and a batch to the flat jaxpr of the loss, its runs, and the structure of its result.

    `jit` caches the trace by shapes, varying axes and settings.
    """
    jitted = jax.jit(lambda *args: loss_fn(*args))
    known: dict[int, tuple[Any, FlatJaxpr, list[BlockRun]]] = {}  # by the jaxpr's id, which keeps the jaxpr alive

    def trace(params: Any, batch: Any) -> tuple[FlatJaxpr, list[BlockRun], Any]:
        traced = jitted.trace(params, *batch)
        closed, structure = traced.jaxpr, tree_util.tree_structure(traced.out_info)
        if (key := id(closed)) in known:
            return *known[key][1:], structure
        cached = closed
        if len(closed.jaxpr.invars) != len(tree_util.tree_leaves((params, batch))):  # it closes over arrays
            closed = jax.make_jaxpr(loss_fn)(params, *batch)
        flat = flatten_for_blocks(closed, len(tree_util.tree_leaves(params)))
        runs = find_runs(flat)
        if not any(isinstance(x, Tracer) for x in closed.consts):  # else it is valid in this trace alone
            known[key] = cached, flat, runs
        return flat, runs, structure

    return trace


def _stacked(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
    if all(isinstance(leaf, bool | np.ndarray | np.generic) for leaf in leaves):
        return np.stack(leaves)  # stays in host memory, and concrete where `init` is traced
    return jnp.stack(leaves)


def _groups(runs: Sequence[BlockRun], paths: Sequence[str], shapes: Sequence[Any]) -> tuple[StackedGroup, ...]:
    """The parameters that the blocks of a run read in one place, each in one group only."""
    groups: list[StackedGroup] = []
    taken: set[int] = set()
    for run in runs:
        for slot in run.wiring.scanned:
            if not _is_numbered(slot) or max(slot) >= len(paths) or len(set(slot)) < len(slot):
                continue
            if taken & set(slot) or len({shapes[v] for v in slot}) > 1:
                continue
            taken |= set(slot)
            name = _common_path([paths[int(v)] for v in slot])
            while name in {g.name for g in groups} | set(paths):
                name += "*"
            groups.append(StackedGroup(name, tuple(slot)))
    return tuple(groups)


def _common_path(paths: Sequence[str]) -> str:
    """One path for several, with `*` in place of the number that differs.

    >>> _common_path(["layer0/0/w", "layer1/1/w"])
    'layer*/*/w'
    """
    parts = [path.split("/") for path in paths]
    if len({len(p) for p in parts}) > 1:
        return paths[0] + "..."
    names = []
    for column in zip(*parts, strict=True):
        heads = {re.sub(r"\d+$", "", word) for word in column}
        names.append(column[0] if len(set(column)) == 1 else heads.pop() + "*" if len(heads) == 1 else "*")
    return "/".join(names)


def _is_numbered(slot: Sequence[Any]) -> bool:
    """Whether the blocks read values here and no literals, which are not hashable."""
    return not any(isinstance(v, core.Literal) for v in slot)


def _slots(run: BlockRun) -> set[tuple[Any, ...]]:
    """The values that the blocks of a run read in turn."""
    return set(filter(_is_numbered, run.wiring.scanned))


# ---- evaluate the scanned loss


def _evaluate(
    flat: FlatJaxpr, runs: Sequence[BlockRun], inputs: Sequence[Callable[[], Any]],
    stacks: Mapping[tuple[int, ...], Any], limit: int, recomputed: int,
) -> list[Any]:  # fmt: skip
    env: dict[int, Any] = dict(flat.consts)
    starts = {run.start: run for run in runs if _slots(run) & stacks.keys()}
    read_later = _read_outside(flat, starts.values())

    def read(v: Any) -> Any:
        if isinstance(v, core.Literal):
            return v.val
        if v not in env and v < flat.inputs:
            env[v] = inputs[v]()
        return env[v]

    i = 0
    while i < len(flat.equations):
        if i in starts:
            _scan(flat, starts[i], env, read, stacks, limit, recomputed, read_later)
            i = starts[i].stop
        else:
            one = flat.equations[i]
            env |= zip(one.outputs, bind_one(one.eqn, list(map(read, one.inputs))), strict=True)
            i += 1
    return list(map(read, flat.outputs))


def _read_outside(flat: FlatJaxpr, runs: Iterable[BlockRun]) -> set[int]:
    """The values that equations outside a run, other runs, or the results read."""
    inside = {i for run in runs for i in range(run.start, run.stop)}
    found = [*flat.outputs, *(v for i, one in enumerate(flat.equations) if i not in inside for v in one.reads)]
    for run in runs:
        found += [v for slot in run.wiring.scanned for v in slot]
        found += [init for *_, init in run.wiring.carried]
        found += [where for row in run.wiring.inputs for kind, where in row if kind == "fixed"]
    return {v for v in found if not isinstance(v, core.Literal)}


def _scan(
    flat: FlatJaxpr, run: BlockRun, env: dict[int, Any], read: Callable[[Any], Any],
    stacks: Mapping[tuple[int, ...], Any], limit: int, recomputed: int, read_later: set[int],
) -> None:  # fmt: skip
    wiring, block = run.wiring, flat.equations[run.start : run.start + run.period]
    result = lambda j, r, o: flat.equations[run.start + j * run.period + r].outputs[o]  # noqa: E731
    carries = {(r, o): k for k, (r, o, _) in enumerate(wiring.carried)}
    collected, only_last = [], []  # results that are read after the run: of several blocks, of the last one alone
    for r, o in [(r, o) for r, one in enumerate(block) for o in range(len(one.outputs))]:
        readers = [j for j in range(run.count) if result(j, r, o) in read_later]
        if readers:
            (only_last if (r, o) in carries and readers == [run.count - 1] else collected).append((r, o))
    fixed = {where: read(where) for row in wiring.inputs for kind, where in row if kind == "fixed"}
    scanned = tuple(
        stacks[slot] if _is_numbered(slot) and slot in stacks else jnp.stack([_value(v, read) for v in slot])
        for slot in wiring.scanned
    )

    def body(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[Any, Any]:
        local: dict[tuple[int, int], Any] = {}
        look = {
            "literal": lambda where: where.val, "local": lambda where: local[where], "carried": lambda where: carry[where],
            "fixed": lambda where: fixed[where], "scanned": lambda where: xs[where],
        }  # fmt: skip
        for r, one in enumerate(block):
            out = bind_one(one.eqn, [look[kind](where) for kind, where in wiring.inputs[r]])
            local |= {(r, o): y for o, y in enumerate(out)}
        return tuple(local[r, o] for r, o, _ in wiring.carried), tuple(local[at] for at in collected)

    carry = tuple(_as_array(read(init), flat.avals[init]) for *_, init in wiring.carried)
    parts: list[Any] = []
    for low, high, rematerialise in _scan_ranges(run.count, limit, recomputed):
        xs = scanned if (low, high) == (0, run.count) else tuple(x[low:high] for x in scanned)
        carry, ys = lax.scan(
            jax.checkpoint(body, prevent_cse=False) if rematerialise else body, carry, xs, length=high - low
        )
        parts.append(ys)
    for k, at in enumerate(collected):
        column = jnp.concatenate([ys[k] for ys in parts]) if len(parts) > 1 else parts[0][k]
        env |= {result(j, *at): column[j] for j in range(run.count)}
    env |= {result(run.count - 1, *at): carry[carries[at]] for at in only_last}


def _value(v: Any, read: Callable[[Any], Any]) -> Any:
    return jnp.asarray(v.val) if isinstance(v, core.Literal) else read(v)


def _as_array(x: Any, aval: Any) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)


def _scan_ranges(count: int, limit: int, recomputed: int) -> Iterator[tuple[int, int, bool]]:
    """The blocks of each scan, and whether the backward pass rematerialises them.

    >>> list(_scan_ranges(10, 4, 0)), list(_scan_ranges(4, 1000, 3))
    ([(0, 4, False), (4, 8, False), (8, 10, False)], [(0, 3, True), (3, 4, False)])
    """
    split = min(recomputed, count)
    for low, high, rematerialise in ((0, split, True), (split, count, False)):
        for start in range(low, high, limit):
            yield start, min(start + limit, high), rematerialise


# ---- why not


def _not_scanned(
    flat: FlatJaxpr, groups: Sequence[StackedGroup], paths: Sequence[str], shapes: Sequence[Any]
) -> Iterator[str]:
    """For parameters that differ by a number in their path and are not stacked: the first difference."""
    grouped = {member for group in groups for member in group.members}
    families: dict[str, list[int]] = collections.defaultdict(list)
    for i, path in enumerate(paths):
        if i not in grouped and re.search(r"\d", path):
            families[re.sub(r"\d+", "*", path, count=1)].append(i)
    roots: dict[str, list[str]] = collections.defaultdict(list)
    shape = lambda i: f"{shapes[i][1]}{list(shapes[i][0])}"  # noqa: E731
    for name, (first, *rest) in families.items():
        odd = next((i for i in rest if shapes[i] != shapes[first]), None)
        if odd is not None:
            yield f"{name} is not scanned: {paths[odd]} is {shape(odd)}, {paths[first]} {shape(first)}"
        elif rest:
            roots[name.split("*")[0] + "*"].append(name)
    for root, names in roots.items():
        shown = ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])
        yield f"{root} is not scanned: {_difference(flat, root, paths)} ({shown})"


def _difference(flat: FlatJaxpr, root: str, paths: Sequence[str]) -> str:
    """The first different equation of neighbouring blocks; a block begins where its first parameter is read."""
    head = root.removesuffix("*")
    first: dict[int, int] = {}
    for at, one in enumerate(flat.equations):
        for v in one.reads:
            if v < len(paths) and fnmatch.fnmatchcase(paths[v], root):
                number = re.match(r"\d+", paths[v][len(head) :])
                if number:
                    first.setdefault(int(number[0]), at)
    numbers = tokens(flat)
    for (a, one), (b, other) in itertools.pairwise(sorted((at, number) for number, at in first.items())):
        for k in range(min(b - a, len(numbers) - b)):
            if numbers[a + k] != numbers[b + k]:
                x, y = _described(flat.equations[a + k]), _described(flat.equations[b + k])
                return f"block {one} has `{x}` where block {other} has `{y}`"
    return "its blocks read their inputs from different places, or do not follow one another"


def _described(one: FlatEquation) -> str:
    text = f"{one.eqn.primitive.name} {', '.join(v.aval.str_short() for v in one.eqn.outvars)}"
    line = equation_line(one.eqn)
    return f"{text} ({line})" if line else text

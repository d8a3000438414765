"""Reuse: repeated blocks of an unrolled model become one scanned body, their parameters stacked once, outside the step.

A model of 24 layers written as a Python loop is traced, partitioned and compiled 24 times, and has 24 times the
collectives. Where its layers are equal but for the parameters that they read, one is kept and scanned.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from shardfn.train.scan_layers.blocks import Program, Run, Step, program, runs, tokens

DEFAULT_LIMIT = 1000
"""The most blocks that one scan stands for, as `MS_COMM_COMPILER_OPT=-1` has it."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that are stacked: the same of each block."""

    name: str
    """Their path, with "*" in place of what differs."""
    members: tuple[int, ...]
    """Positions among the leaves."""


@dataclasses.dataclass(frozen=True)
class Folded:
    """A run of blocks that became one."""

    count: int
    steps: int
    """Equations in one block."""
    names: tuple[str, ...]
    """The parameters that it reads, stacked."""

    def __str__(self) -> str:
        return f"{self.count} blocks of {self.steps} equations are one: {', '.join(self.names)}"


@dataclasses.dataclass(frozen=True)
class ScannedLoss:
    """A loss with its blocks folded, and the way between parameters and stacked ones."""

    loss: Callable[..., Any]
    """Takes stacked parameters in the place of the parameters."""
    stack: Callable[[Any], dict[str, Any]]
    """Parameters to stacked ones: a dict by path."""
    unstack: Callable[[Mapping[str, Any]], Any]
    folded: tuple[Folded, ...]
    diagnostics: tuple[str, ...]
    """Why blocks that look alike were not folded."""
    groups: tuple[Group, ...]

    def explain(self) -> str:
        """What was folded, and what was not and why."""
        lines = [str(one) for one in self.folded] or ["nothing is folded"]
        return "\n".join([*lines, *self.diagnostics])


def limit_of(reuse: Any) -> int | None:
    """The most blocks in one scan; None for no reuse.

    Args:
      reuse: None or False for none; "auto", True or -1 for the default limit; a positive int for another one. Numbers
        may be text, as the environment has them: `reuse=os.environ.get("MS_COMM_COMPILER_OPT")`.

    Raises:
      StrategyError, StrategyTypeError: anything else.

    >>> limit_of("auto"), limit_of(-1), limit_of("12"), limit_of(None)
    (1000, 1000, 12, None)
    """
    raise_problems(list(reuse_problems(reuse)))
    if reuse is None or reuse is False:
        return None
    number = -1 if reuse is True or reuse == "auto" else int(reuse)
    return DEFAULT_LIMIT if number == -1 else number


def reuse_problems(reuse: Any) -> Iterator[Problem]:
    """What is wrong with `reuse`."""
    fits = reuse is None or isinstance(reuse, bool) or reuse == "auto"
    if isinstance(reuse, str) and re.fullmatch(r"-?[0-9]+", reuse):
        reuse = int(reuse)
    if not (fits or (isinstance(reuse, int) and (reuse == -1 or reuse > 0))):
        yield Problem(f"`reuse` cannot be {short(reuse)}", f"reuse = {short(reuse)}",
                      "it is the most blocks that one body stands for", 'write "auto", -1 (1000) or a positive int',
                      is_type=not isinstance(reuse, int | str))  # fmt: skip


def fold(
    loss_fn: Callable[..., Any], params: Any, *batch: Any, limit: int = DEFAULT_LIMIT, recomputed: int = 0
) -> ScannedLoss:
    """Fold the repeated blocks of a loss function.

    Args:
      loss_fn: `(params, *batch) -> anything`; it is traced.
      params: a pytree of arrays or shapes.
      batch: arrays or shapes; the folded loss takes others too, for which it is traced anew.
      limit: the most blocks that one scan stands for.
      recomputed: so many of the blocks of each run, the first ones, are worked out again in the backward pass.

    Returns:
      A `ScannedLoss`. Where nothing repeats its loss is the one given, on a dict of the same arrays.

    >>> import jax.numpy as jnp
    >>> def loss(params, x):
    ...     for layer in params["layers"]:
    ...         x = jnp.tanh(x @ layer["w"])
    ...     return x.sum()
    >>> params = {"layers": [{"w": jnp.full((3, 3), i / 9.0)} for i in range(4)]}
    >>> made = fold(loss, params, jnp.ones((2, 3)))
    >>> print(made.explain())
    4 blocks of 2 equations are one: layers/*/w
    >>> made.stack(params)["layers/*/w"].shape
    (4, 3, 3)
    >>> bool(jnp.allclose(made.loss(made.stack(params), jnp.ones((2, 3))), loss(params, jnp.ones((2, 3)))))
    True
    """
    keyed, treedef = tree_util.tree_flatten_with_path(params)
    paths = [tidy(join("", key)) for key, _ in keyed]
    shapes = [(tuple(x.shape), str(x.dtype)) for _, x in keyed]
    traced = _tracer(loss_fn)
    made, found, _ = traced(params, batch)
    groups = _groups(found, paths, shapes)
    grouped = {member: (i, j) for i, group in enumerate(groups) for j, member in enumerate(group.members)}
    names = [None if i in grouped else path for i, path in enumerate(paths)]

    def stack(given: Any) -> dict[str, Any]:
        leaves = treedef.flatten_up_to(given)
        rest = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name is not None}
        return rest | {group.name: _stacked([leaves[i] for i in group.members]) for group in groups}

    def leaf_of(stacked: Mapping[str, Any], i: int) -> Any:
        name = names[i]
        return stacked[name] if name is not None else stacked[groups[grouped[i][0]].name][grouped[i][1]]

    def unstack(stacked: Mapping[str, Any]) -> Any:
        return tree_util.tree_unflatten(treedef, [leaf_of(stacked, i) for i in range(len(paths))])

    def folded_loss(stacked: Mapping[str, Any], *given: Any) -> Any:
        found: list[Any] = []  # by values and not by shapes: within a shard_map they say what differs between devices
        jax.eval_shape(lambda values: found.extend(traced(unstack(values), given)), dict(stacked))
        here, repeated, structure = found
        whole = {group.members: stacked[group.name] for group in groups}
        inputs = [lambda i=i: leaf_of(stacked, i) for i in range(len(paths))]
        inputs += [lambda x=x: x for x in tree_util.tree_leaves(given)]
        flat = _evaluate(here, repeated, inputs, whole, limit, recomputed)
        return tree_util.tree_unflatten(structure, flat)

    reports = [_report(run, groups) for run in found]
    kept = tuple(report for report in reports if report.names)
    diagnostics = tuple(_unfolded(made, groups, paths, shapes))
    return ScannedLoss(folded_loss, stack, unstack, kept, diagnostics, groups)


def _tracer(loss_fn: Callable[..., Any]) -> Callable[[Any, Any], tuple[Program, list[Run], Any]]:
    """From parameters and a batch to the loss's program, its runs, and the structure of what it gives.

    `jit` knows when a trace holds again (shapes, what differs between devices, settings); a step asks several times.
    """
    jitted = jax.jit(lambda *args: loss_fn(*args))
    known: dict[int, tuple[Any, Program, list[Run]]] = {}  # by the jaxpr, which is kept so that its id stays its own

    def traced(params: Any, batch: Any) -> tuple[Program, list[Run], Any]:
        found = jitted.trace(params, *batch)
        key, structure = found.jaxpr, tree_util.tree_structure(found.out_info)
        if id(key) in known:
            return *known[id(key)][1:], structure
        closed = key
        if len(closed.jaxpr.invars) != len(tree_util.tree_leaves((params, batch))):  # it closes over arrays
            closed = jax.make_jaxpr(loss_fn)(params, *batch)
        made = program(closed, len(tree_util.tree_leaves(params)))
        repeated = runs(made)
        if not any(isinstance(x, Tracer) for x in closed.consts):  # else it holds in this trace alone
            known[id(key)] = key, made, repeated
        return made, repeated, structure

    return traced


def _stacked(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype)
    if all(isinstance(leaf, bool | np.ndarray | np.generic) for leaf in leaves):
        return np.stack(leaves)  # stays in the host's memory, and what it is where `init` is traced
    return jnp.stack(leaves)


def _groups(found: Sequence[Run], paths: Sequence[str], shapes: Sequence[Any]) -> tuple[Group, ...]:
    """What is stacked: leaves that the blocks of a run read in one place, each in one group only."""
    groups: list[Group] = []
    taken: set[int] = set()
    for run in found:
        for slot in run.wiring.scanned:
            if any(isinstance(v, core.Literal) or v >= len(paths) for v in slot) or len(set(slot)) < len(slot):
                continue
            if taken & set(slot) or len({shapes[v] for v in slot}) > 1:
                continue
            taken |= set(slot)
            name = _name([paths[int(v)] for v in slot])
            while name in {g.name for g in groups} | set(paths):
                name += "*"
            groups.append(Group(name, tuple(slot)))
    return tuple(groups)


def _name(paths: Sequence[str]) -> str:
    parts = [path.split("/") for path in paths]
    if len({len(p) for p in parts}) > 1:
        return paths[0] + "..."
    return "/".join(column[0] if len(set(column)) == 1 else _common(column) for column in zip(*parts, strict=True))


def _common(words: Sequence[str]) -> str:
    """`layer0`, `layer1` to `layer*`.

    >>> _common(["layer0", "layer1"]), _common(["0", "1"])
    ('layer*', '*')
    """
    heads = {re.sub(r"\d+$", "", word) for word in words}
    return heads.pop() + "*" if len(heads) == 1 else "*"


def _is_values(slot: Sequence[Any]) -> bool:
    return not any(isinstance(v, core.Literal) for v in slot)


def _values(run: Run) -> list[tuple[Any, ...]]:
    """What the blocks of a run read in turn, literals left out: those are not hashable."""
    return [slot for slot in run.wiring.scanned if _is_values(slot)]


def _report(run: Run, groups: Sequence[Group]) -> Folded:
    slots = set(_values(run))
    return Folded(run.count, run.period, tuple(g.name for g in groups if g.members in slots))


# ---- the folded program


def _evaluate(
    made: Program, found: Sequence[Run], inputs: Sequence[Callable[[], Any]], whole: Mapping[tuple[int, ...], Any],
    limit: int, recomputed: int,
) -> list[Any]:  # fmt: skip
    env: dict[int, Any] = dict(made.consts)
    starts = {run.start: run for run in found if any(slot in whole for slot in _values(run))}
    read_later = _read_outside(made, starts.values())

    def read(v: Any) -> Any:
        if isinstance(v, core.Literal):
            return v.val
        if v not in env and v < made.inputs:
            env[v] = inputs[v]()
        return env[v]

    i = 0
    while i < len(made.steps):
        run = starts.get(i)
        if run is None:
            step = made.steps[i]
            env |= zip(step.makes, bind_one(step.eqn, [read(v) for v in step.reads]), strict=True)
            i += 1
        else:
            _scan(made, run, env, read, whole, limit, recomputed, read_later)
            i = run.stop
    return [read(v) for v in made.outputs]


def _read_outside(made: Program, folded: Any) -> set[int]:
    """What steps outside a run, or the results, read."""
    inside = {i for run in folded for i in range(run.start, run.stop)}
    found = {v for v in made.outputs if not isinstance(v, core.Literal)}
    for i, step in enumerate(made.steps):
        if i not in inside:
            found |= {v for v in step.reads if not isinstance(v, core.Literal)}
    for run in folded:  # and what another run reads of it
        found |= {v for slot in run.wiring.scanned for v in slot if not isinstance(v, core.Literal)}
        found |= {init for *_, init in run.wiring.carried}
        found |= {where for row in run.wiring.slots for kind, where in row if kind == "fixed"}
    return found


def _scan(
    made: Program, run: Run, env: dict[int, Any], read: Callable[[Any], Any], whole: Mapping[tuple[int, ...], Any],
    limit: int, recomputed: int, read_later: set[int],
) -> None:  # fmt: skip
    wiring, block = run.wiring, made.steps[run.start : run.start + run.period]
    wanted = [  # what each block makes that is read after the run
        (r, o)
        for r in range(run.period)
        for o in range(len(block[r].makes))
        if any(made.steps[run.start + j * run.period + r].makes[o] in read_later for j in range(run.count))
    ]
    lasting = {(step, output) for step, output, _ in wiring.carried}
    only_last = {
        (r, o) for r, o in wanted
        if (r, o) in lasting
        and not any(made.steps[run.start + j * run.period + r].makes[o] in read_later for j in range(run.count - 1))
    }  # fmt: skip
    collected = [at for at in wanted if at not in only_last]
    fixed = {where: read(where) for row in wiring.slots for kind, where in row if kind == "fixed"}
    scanned = tuple(
        whole[slot]
        if _is_values(slot) and slot in whole
        else jnp.stack([jnp.asarray(read(v)) if isinstance(v, core.Literal) else read(v) for v in slot])
        for slot in wiring.scanned
    )
    carried = tuple(read(init) for *_, init in wiring.carried)

    def body(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[Any, Any]:
        local: dict[tuple[int, int], Any] = {}
        look = {
            "literal": lambda where: where.val, "local": lambda where: local[where], "carried": lambda where: carry[where],
            "fixed": lambda where: fixed[where], "scanned": lambda where: xs[where],
        }  # fmt: skip
        for r, step in enumerate(block):
            out = bind_one(step.eqn, [look[kind](where) for kind, where in wiring.slots[r]])
            local |= {(r, o): y for o, y in enumerate(out)}
        return tuple(local[step, output] for step, output, _ in wiring.carried), tuple(local[at] for at in collected)

    carried = tuple(_as(x, made.avals[init]) for x, (*_, init) in zip(carried, wiring.carried, strict=True))
    pieces: list[Any] = []
    for low, high, again in _stretches(run.count, limit, recomputed):
        xs = scanned if (low, high) == (0, run.count) else tuple(x[low:high] for x in scanned)
        carried, ys = lax.scan(
            jax.checkpoint(body, prevent_cse=False) if again else body, carried, xs, length=high - low
        )
        pieces.append(ys)
    for k, at in enumerate(collected):
        column = jnp.concatenate([ys[k] for ys in pieces]) if len(pieces) > 1 else pieces[0][k]
        for j in range(run.count):
            env[made.steps[run.start + j * run.period + at[0]].makes[at[1]]] = column[j]
    for at in only_last:
        which = next(i for i, (step, output, _) in enumerate(wiring.carried) if (step, output) == at)
        env[made.steps[run.stop - run.period + at[0]].makes[at[1]]] = carried[which]


def _as(x: Any, aval: Any) -> Any:
    return jnp.asarray(x, aval.dtype) if not isinstance(x, jax.Array) else x


def _stretches(count: int, limit: int, recomputed: int) -> Iterator[tuple[int, int, bool]]:
    """From where to where each scan goes, and whether it is recomputed.

    >>> list(_stretches(10, 4, 0)), list(_stretches(4, 1000, 3))
    ([(0, 4, False), (4, 8, False), (8, 10, False)], [(0, 3, True), (3, 4, False)])
    """
    for low, high, again in ((0, min(recomputed, count), True), (min(recomputed, count), count, False)):
        for start in range(low, high, limit):
            yield start, min(start + limit, high), again


# ---- why not


def _unfolded(made: Program, groups: Sequence[Group], paths: Sequence[str], shapes: Sequence[Any]) -> Iterator[str]:
    """For parameters that differ by a number in their path and are not stacked: the first thing that differs."""
    grouped = {member for group in groups for member in group.members}
    families: dict[str, list[int]] = collections.defaultdict(list)
    for i, path in enumerate(paths):
        if i not in grouped and re.search(r"\d", path):
            families[re.sub(r"\d+", "*", path, count=1)].append(i)
    sizes: list[str] = []
    roots: dict[str, list[str]] = collections.defaultdict(list)
    for name, members in families.items():
        if len(members) < 2:
            continue
        odd = next((i for i in members if shapes[i] != shapes[members[0]]), None)
        if odd is not None:
            sizes.append(
                f"{name} is not folded: {paths[odd]} is {_shape(shapes[odd])}, {paths[members[0]]} {_shape(shapes[members[0]])}"
            )
        else:
            roots[name.split("*")[0] + "*"].append(name)
    yield from sizes
    for root, names in roots.items():
        shown = ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])
        yield f"{root} is not folded: {_difference(made, root, paths)} ({shown})"


def _difference(made: Program, root: str, paths: Sequence[str]) -> str:
    """The first step that two blocks side by side do not share, a block being what runs from one's first parameter on."""
    head = root.removesuffix("*")
    first: dict[int, int] = {}
    for at, step in enumerate(made.steps):
        for v in step.reads:
            if not isinstance(v, core.Literal) and v < len(paths) and fnmatch.fnmatchcase(paths[int(v)], root):
                number = re.match(r"\d+", paths[int(v)][len(head) :])
                if number:
                    first.setdefault(int(number[0]), at)
    starts = sorted((at, number) for number, at in first.items())
    numbers = tokens(made)
    for (a, one), (b, other) in itertools.pairwise(starts):
        end = min(b - a, len(numbers) - b)
        for k in range(end):
            if numbers[a + k] != numbers[b + k]:
                x, y = made.steps[a + k], made.steps[b + k]
                return f"block {one} has `{_said(x)}` where block {other} has `{_said(y)}`"
    return "its blocks are wired in different ways, or do not follow one another"


def _said(step: Step) -> str:
    made = f"{step.eqn.primitive.name} {', '.join(v.aval.str_short() for v in step.eqn.outvars)}"
    line = equation_line(step.eqn)
    return f"{made} ({line})" if line else made


def _shape(shape: tuple[tuple[int, ...], str]) -> str:
    return f"{shape[1]}{list(shape[0])}"

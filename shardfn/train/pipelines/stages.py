"""Which op belongs to which pipeline stage, and each stage as a function of what it reads and gets.

An op on the way from the batch to the loss has one stage. What reads no parameter (masks, positions) is worked out again
wherever it is read, and so is what only rearranges parameters (casts, transposes); a term of the loss that reduces
parameters alone is worked out where they are. What a later stage reads is handed on from neighbour to neighbour.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardfn.errors import Problem, raise_problems, warn
from shardfn.ir.rewrite import bind_one
from shardfn.train.pipelines.balance import balanced, least_largest
from shardfn.train.pipelines.program import Op, Program, Value, cost_s

OP = "pipeline_op_"
"""The scope of an op of a stage, before its number."""

SLACK = 0.02
"""How much longer the longest stage may get for less to send between stages."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a stage reads, gets, works out and hands on; numbers are values of the program."""

    ops: tuple[Op, ...]
    leaves: tuple[int, ...]
    gets: tuple[int, ...]
    gives: tuple[int, ...]
    cost_s: float

    def run(
        self, program: Program, known: Mapping[int, Any], bind: Callable[[Any, Sequence[Any]], Sequence[Any]] = bind_one
    ) -> dict[int, Any]:
        """The values that it works out, each op by `bind`, from its leaves, the batch and what it gets."""
        env = {**known}
        read = lambda v: env[v.number] if isinstance(v, Value) else v  # noqa: E731
        for number, const in program.consts.items():
            env[number] = const
        for number, op in enumerate(self.ops):
            with jax.named_scope(f"{OP}{number}"):  # so that what XLA makes of it can be told
                env.update(zip(op.outputs, bind(op.eqn, [read(v) for v in op.inputs]), strict=True))
        return env


@dataclasses.dataclass(frozen=True)
class Cut:
    """A program cut into stages."""

    program: Program
    stages: tuple[Stage, ...]
    homes: tuple[int, ...]
    """For each leaf of the parameters the stage that reads it; -1 where several do, or none."""
    largest: float
    """The cost of the longest stage in modelled seconds, without what is worked out again on several."""
    bound: float
    """That of the best contiguous cut of the same ops."""
    at: tuple[int | None, ...]
    """The stage of each op of the program; None for one that is worked out wherever it is read."""

    def repeated(self, program: Program) -> dict[int, int] | None:
        """The stages of the ops of this program at other shapes or dtypes; None if it is another one."""
        mine, its = ([i for i, op in enumerate(p.ops) if not _is_cast(op)] for p in (self.program, program))
        names = [[p.ops[i].eqn.primitive.name for i in on] for p, on in ((self.program, mine), (program, its))]
        if names[0] != names[1]:
            return None
        there = {i: self.at[m] for m, i in zip(mine, its, strict=True)}
        at = {i: stage for i, stage in there.items() if stage is not None}
        makers = {o: i for i, op in enumerate(program.ops) for o in op.outputs}
        for i, op in enumerate(program.ops):
            reads = [makers[v] for v in op.reads() if v in makers]
            if _is_cast(op) and reads and reads[0] in at:
                at[i] = at[reads[0]]
        return at


def _is_cast(op: Op) -> bool:
    return op.eqn.primitive.name == "convert_element_type"


def _warn_of(program: Program, placed: Sequence[int], costs: Sequence[float], total: float, count: int) -> None:
    """Say which op has the most of the work."""
    cost, index = max(zip(costs, placed, strict=True))
    name = program.ops[index].eqn.primitive.name
    warn(
        f"the stages of the pipeline are far from even: `{name}` has {cost / total:.0%} of the work, where a stage should have "
        f"{1 / count:.0%}, and is not cut; unroll a lax.scan over layers, or give the layers as a list"
    )


LOPSIDED = 1.5
"""How many times its share the largest layer or op may have before that is said."""


def cut(
    program: Program, count: int, devices: int, marks: Sequence[int | None], layers: int, by_cost: bool,
    paths: Sequence[str], like: Cut | None = None,
) -> Cut:  # fmt: skip
    """Cut a program into `count` stages.

    Args:
      program: of the loss of one micro-batch.
      count: how many stages.
      devices: how many of them work at a time: a `staged` segment is so many stages on.
      marks: for each leaf of the parameters, the stage that its first reader is in, None where nothing says it.
      layers: how many `staged` functions the program is made of, where it was given as a list; else 0.
      by_cost: cut where the stages' costs are most alike.
      paths: the leaves' names, for messages.
      like: a cut of the same program at other shapes, to be repeated.

    Raises:
      StrategyError: marks that go backwards, or a stage with nothing in it.
    """
    kinds = _kinds(program)
    placed = [i for i, op in enumerate(program.ops) if kinds[op.outputs[0]] == "both"] if program.ops else []
    costs = [cost_s(program.ops[i]) for i in placed]
    links = _links(program, placed, layers)
    sums = [sum(costs[a:b]) for a, b in links]
    again = like.repeated(program) if like is not None else None
    if again is not None:
        at = again
    elif (layers and layers != count) or by_cost:
        _enough(len(links), count, "layers" if layers else "ops between the batch and the loss")
        if max(sums) > LOPSIDED * sum(sums) / count:
            _warn_of(program, placed, costs, sum(sums), count)
        begins = balanced(sums, count, _sent(program, placed, kinds, [a for a, _ in links]), SLACK)
        stage_of_link = [sum(k >= b for b in begins) for k in range(len(links))]
        at = {placed[i]: stage_of_link[k] for k, (a, b) in enumerate(links) for i in range(a, b)}
    else:
        at = _marked(program, placed, kinds, marks, paths, count, 0 if layers else devices)
    ends = {o: s for i, s in at.items() for o in program.ops[i].outputs}
    _place_terms(program, kinds, at, ends, count)
    stages = _stages(program, at, ends, count)
    raise_problems([
        Problem(f"stage {s} of {count} has nothing to do", f"pipeline_stages = {count}",
                "no op was put there", "mark a part of the model with it, or use fewer stages")
        for s, stage in enumerate(stages) if not any(i in at and at[i] == s for i in placed if program.ops[i] in stage.ops)
    ])  # fmt: skip
    readers: list[list[int]] = [
        [s for s, stage in enumerate(stages) if leaf in stage.leaves] for leaf in range(program.params)
    ]
    homes = tuple(r[0] if len(r) == 1 else -1 for r in readers)
    largest = max(sum(cost_s(program.ops[i]) for i in placed if at[i] == s) for s in range(count))
    return Cut(program, tuple(stages), homes, largest, least_largest(sums, count) if len(sums) >= count else math.inf,
               tuple(at.get(i) for i in range(len(program.ops))))  # fmt: skip


def _kinds(program: Program) -> dict[int, str]:
    """For each value: "params", "batch" or "both" of what it comes from, "none", or "term": of parameters, but small."""
    kinds = dict.fromkeys(range(program.params), "params")
    kinds |= dict.fromkeys(range(program.params, program.params + program.batch), "batch")
    kinds |= dict.fromkeys(program.consts, "none")
    for op in program.ops:
        seen = {kinds[v] for v in op.reads()}
        if "both" in seen or (seen & {"params", "term"} and "batch" in seen):
            kind = "both"
        elif seen & {"params", "term"}:
            kind = "term" if "term" in seen or _is_reduction(op, program) else "params"
        else:
            kind = "batch" if "batch" in seen else "none"
        kinds.update(dict.fromkeys(op.outputs, kind))
    return kinds


def _is_reduction(op: Op, program: Program) -> bool:
    name = op.eqn.primitive.name
    return name.startswith("reduce_") and not program.avals[op.outputs[0]].shape


def _links(program: Program, placed: Sequence[int], layers: int) -> list[tuple[int, int]]:
    """The runs of placed ops that are not cut: each op alone, or each layer of a list."""
    if not layers:
        return [(i, i + 1) for i in range(len(placed))]
    runs: list[tuple[int, int]] = []
    for layer in range(layers):
        begin = runs[-1][1] if runs else 0
        end = begin
        while end < len(placed) and (layer == layers - 1 or (program.ops[placed[end]].mark or (0, 0))[0] <= layer):
            end += 1
        runs.append((begin, end))
    return runs


def _sent(program: Program, placed: Sequence[int], kinds: Mapping[int, str], begins: Sequence[int]) -> list[float]:
    """For each link the bytes that go over its beginning."""
    last: dict[int, int] = {}
    made: dict[int, int] = {}
    for k, i in enumerate(placed):
        op = program.ops[i]
        last |= {v: k for v in op.reads() if kinds[v] == "both"}
        made |= dict.fromkeys(op.outputs, k)
    change = [0.0] * (len(placed) + 2)
    for value, end in last.items():
        aval = program.avals[value]
        change[made[value] + 1] += math.prod(aval.shape) * aval.dtype.itemsize
        change[end + 1] -= math.prod(aval.shape) * aval.dtype.itemsize
    crossing, total = [], 0.0
    for delta in change:
        total += delta
        crossing.append(total)
    return [crossing[min(b, len(placed))] for b in begins]


def _marked(
    program: Program, placed: Sequence[int], kinds: Mapping[int, str], marks: Sequence[int | None],
    paths: Sequence[str], count: int, devices: int,
) -> dict[int, int]:  # fmt: skip
    """The stage of each placed op: the latest of what it reads, and of its own mark."""
    leaves = _leaves_under(program, kinds)
    at: dict[int, int] = {}
    ends: dict[int, int] = {}
    first: dict[int, int] = {}
    late: list[Problem] = []
    for i in placed:
        op = program.ops[i]
        before = max((ends.get(v, 0) for v in op.reads()), default=0)
        read = {leaf for v in op.reads() for leaf in leaves.get(v, ())}
        said = [m for leaf in read if leaf not in first and (m := marks[leaf]) is not None]
        mark = op.mark or (0, 0)
        own = mark[1] * devices + mark[0]
        if op.mark and own < before:
            late.append(Problem(f"`staged` ops go back from stage {before} to stage {own}",
                                f"{op.eqn.primitive.name} in staged(..., {mark[0]}, {mark[1]})",
                                "it reads what a later stage works out",
                                "number the stages in the order of the data"))  # fmt: skip
        if own >= count:
            late.append(Problem(f"`staged` ops are marked for stage {own}",
                                f"{op.eqn.primitive.name} in staged(..., {mark[0]}, {mark[1]})",
                                f"stages are 0 to {count - 1}", "mark them lower, or use more stages"))  # fmt: skip
        stage = max([before, own, *said])
        at[i] = stage
        ends |= dict.fromkeys(op.outputs, stage)
        for leaf in read:
            first.setdefault(leaf, stage)
    backwards = [leaf for leaf, s in first.items() if (m := marks[leaf]) is not None and m < s]
    raise_problems([
        *late[:1],
        *(Problem(f"the mark of `{paths[leaf]}` goes backwards", f"`{paths[leaf]}`: stage {marks[leaf]}",
                  f"the first op that reads it also reads what stage {first[leaf]} works out",
                  "number the stages in the order of the data") for leaf in backwards),
        *(Problem(f"`{paths[leaf]}` is marked for stage {m}", f"pipeline_stages = {count}",
                  f"stages are 0 to {count - 1}", "mark it lower, or use more stages")
          for leaf, m in enumerate(marks) if m is not None and m >= count),
    ])  # fmt: skip
    return at


def _leaves_under(program: Program, kinds: Mapping[int, str]) -> dict[int, frozenset[int]]:
    """The parameters that a value rearranges."""
    found = {leaf: frozenset((leaf,)) for leaf in range(program.params)}
    for op in program.ops:
        if kinds[op.outputs[0]] in ("params", "term"):
            under = frozenset().union(*(found.get(v, frozenset()) for v in op.reads()))
            found |= dict.fromkeys(op.outputs, under)
    return found


def _place_terms(
    program: Program, kinds: Mapping[int, str], at: dict[int, int], ends: dict[int, int], count: int
) -> None:
    """Terms of parameters alone go to the stage where those are read anyway."""
    leaves = _leaves_under(program, kinds)
    home: dict[int, int] = {}
    for i in sorted(at):
        for v in program.ops[i].reads():
            if kinds[v] == "params":
                for leaf in leaves.get(v, ()):
                    home.setdefault(leaf, at[i])
    for i, op in enumerate(program.ops):
        if kinds[op.outputs[0]] == "term":
            stage = max([home.get(leaf, 0) for leaf in leaves[op.outputs[0]]], default=0)
            at[i] = stage
            ends |= dict.fromkeys(op.outputs, stage)
    for i in sorted(at):  # what reads a term comes after it
        op = program.ops[i]
        at[i] = max([at[i], *(ends.get(v, 0) for v in op.reads())])
        ends |= dict.fromkeys(op.outputs, at[i])
    if isinstance(program.loss, Value) and program.loss.number not in ends:
        ends[program.loss.number] = count - 1


def _stages(program: Program, at: Mapping[int, int], ends: Mapping[int, int], count: int) -> list[Stage]:
    makers = {o: i for i, op in enumerate(program.ops) for o in op.outputs}
    asked: list[set[int]] = []  # of each stage, what it reads that an earlier one works out
    held: list[tuple[tuple[Op, ...], tuple[int, ...]]] = []
    for stage in range(count):
        ops: set[int] = {i for i, s in at.items() if s == stage}
        todo = [v for i in ops for v in program.ops[i].reads()]
        if stage == count - 1 and isinstance(program.loss, Value):
            todo.append(program.loss.number)
        seen: set[int] = set()
        gets: set[int] = set()
        leaves: set[int] = set()
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            if v < program.params:
                leaves.add(v)
            elif v in makers:
                i = makers[v]
                if i in at:
                    if at[i] < stage:
                        gets.add(v)
                else:
                    ops.add(i)
                    todo += program.ops[i].reads()
        asked.append(gets)
        held.append((tuple(program.ops[i] for i in sorted(ops)), tuple(sorted(leaves))))
    stages = []
    for stage in range(count):
        over = lambda border: {v for later in asked[border:] for v in later if ends[v] < border}  # noqa: E731
        comes = tuple(sorted(over(stage))) if stage else ()
        goes = tuple(sorted(over(stage + 1))) if stage + 1 < count else ()
        does, reads = held[stage]
        stages.append(Stage(does, reads, comes, goes, sum(cost_s(op) for op in does)))
    return stages


def _enough(links: int, count: int, what: str) -> None:
    if links < count:
        raise_problems([Problem(f"{count} stages cannot be cut from {links} {what}", f"pipeline_stages = {count}",
                                "each stage needs one at least", f"use {max(links, 1)} stages or fewer")])  # fmt: skip


def is_inexact(aval: Any) -> bool:
    """Whether a value has a gradient."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)

"""Assign each equation of a loss to a pipeline stage, and run one stage.

An equation that depends on parameters and batch has one stage. Every stage that needs them recomputes masks and
positions (no parameter) as well as casts and transposes of parameters. A loss term that reduces parameters alone runs on
the stage that holds them. Each stage forwards what later stages read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from shardfn.errors import Problem, raise_problems, warn
from shardfn.ir.rewrite import bind_one
from shardfn.train.flat_jaxpr import FlatEquation, FlatJaxpr
from shardfn.train.pipelines.balance import least_largest, split_chain
from shardfn.train.pipelines.trace_loss import cost_s

EQUATION_SCOPE = "pipeline_op_"
"""The named scope of an equation of a stage, before its number."""

BALANCE_SLACK = 0.02
"""How much longer the longest stage may get, as a fraction, to send fewer bytes between stages."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One pipeline stage; numbers are values of the loss's flat jaxpr."""

    equations: tuple[FlatEquation, ...]
    leaves: tuple[int, ...]
    """The parameters that it reads."""
    sends: tuple[int, ...]
    """What later stages read, of this stage's results or of those before."""
    cost_s: float

    def run(
        self, jaxpr: FlatJaxpr, known: Mapping[int, Any], bind: Callable[[Any, Sequence[Any]], Sequence[Any]] = bind_one
    ) -> dict[int, Any]:
        """All values of the stage, computed from its parameters, the batch and what it receives (`known`)."""
        env = {**known, **jaxpr.consts}
        read = lambda v: v.val if isinstance(v, core.Literal) else env[v]  # noqa: E731
        for number, one in enumerate(self.equations):
            with jax.named_scope(f"{EQUATION_SCOPE}{number}"):  # so that the compiled module names the equation
                env.update(zip(one.outputs, bind(one.eqn, list(map(read, one.inputs))), strict=True))
        return env


@dataclasses.dataclass(frozen=True)
class StageSplit:
    """A loss split into stages."""

    jaxpr: FlatJaxpr
    stages: tuple[Stage, ...]
    stage_of_leaf: tuple[int, ...]
    """For each parameter the stage that reads it; -1 where several stages read it, or none."""
    longest_s: float
    """Modelled seconds of the longest stage, without what several stages recompute."""
    bound_s: float
    """Modelled seconds of the longest stage in the best contiguous split."""
    stage_of: tuple[int | None, ...]
    """The stage of each equation; None for one that every reading stage recomputes."""

    def repeated(self, jaxpr: FlatJaxpr) -> dict[int, int] | None:
        """The same split of the same loss at other shapes or dtypes; None for another loss."""
        mine, other = ([i for i, e in enumerate(j.equations) if not _is_cast(e)] for j in (self.jaxpr, jaxpr))
        names = [[j.equations[i].eqn.primitive.name for i in at] for j, at in ((self.jaxpr, mine), (jaxpr, other))]
        if names[0] != names[1]:
            return None
        stage_of = {i: stage for m, i in zip(mine, other, strict=True) if (stage := self.stage_of[m]) is not None}
        for i, one in enumerate(jaxpr.equations):
            if _is_cast(one) and one.reads and (source := jaxpr.makers.get(one.reads[0])) in stage_of:
                stage_of[i] = stage_of[source]
        return stage_of


def _is_cast(one: FlatEquation) -> bool:
    return one.eqn.primitive.name == "convert_element_type"


UNEVEN = 1.5
"""A warning names the largest layer or op if it costs more than so many times an even share."""


def split_into_stages(
    jaxpr: FlatJaxpr, count: int, devices: int, marks: Sequence[int | None], layers: int, by_cost: bool,
    paths: Sequence[str], like: StageSplit | None = None,
) -> StageSplit:  # fmt: skip
    """Split a loss into stages.

    Args:
      jaxpr: the loss of one micro-batch.
      count: the number of stages.
      devices: how many of them run at a time; a `staged` segment is so many stages further on.
      marks: for each parameter the stage of its first reader, None where the user gave none.
      layers: how many `staged` functions a list of layers has; 0 for a loss function.
      by_cost: balance the stages' modelled costs.
      paths: the parameters' paths, for messages.
      like: a split of the same loss at other shapes, to be repeated.

    Raises:
      StrategyError: stage marks go backwards, or a stage is empty.
    """
    kinds = _kinds(jaxpr)
    main = [i for i, one in enumerate(jaxpr.equations) if kinds[one.outputs[0]] == "both"]
    costs = [cost_s(jaxpr.equations[i].eqn) for i in main]
    links = _links(jaxpr, main, layers)
    link_costs = [sum(costs[a:b]) for a, b in links]
    repeated = like.repeated(jaxpr) if like is not None else None
    if repeated is not None:
        stage_of = repeated
    elif (layers and layers != count) or by_cost:
        if len(links) < count:
            raise_problems([Problem(
                f"{len(links)} {'layers' if layers else 'ops between the batch and the loss'} cannot form {count} stages",
                f"pipeline_stages = {count}", "each stage needs at least one", f"use {max(len(links), 1)} stages or fewer",
            )])  # fmt: skip
        if max(link_costs) > UNEVEN * sum(link_costs) / count:
            cost, index = max(zip(costs, main, strict=True))
            warn(f"the pipeline stages are far from even: `{jaxpr.equations[index].eqn.primitive.name}` has "
                 f"{cost / sum(costs):.0%} of the work, an even stage {1 / count:.0%}, and no stage boundary can divide it; "
                 "unroll a lax.scan over layers, or give the layers as a list")  # fmt: skip
        begins = split_chain(link_costs, count, _crossing_bytes(jaxpr, main, kinds, links), BALANCE_SLACK)
        stage_of = {
            main[i]: sum(k >= b for b in begins) for k, (low, high) in enumerate(links) for i in range(low, high)
        }
    else:
        stage_of = _by_marks(jaxpr, main, kinds, marks, paths, count, 0 if layers else devices)
    _place_terms(jaxpr, kinds, stage_of)
    stages = _stages(jaxpr, stage_of, count)
    raise_problems([_empty(s, count, devices) for s in range(count) if not any(stage_of.get(i) == s for i in main)])
    readers = [[s for s, stage in enumerate(stages) if leaf in stage.leaves] for leaf in range(jaxpr.params)]
    return StageSplit(
        jaxpr, tuple(stages), tuple(r[0] if len(r) == 1 else -1 for r in readers),
        max(sum(c for i, c in zip(main, costs, strict=True) if stage_of[i] == s) for s in range(count)),
        least_largest(link_costs, count) if len(link_costs) >= count else math.inf,
        tuple(stage_of.get(i) for i in range(len(jaxpr.equations))),
    )  # fmt: skip


def _kinds(jaxpr: FlatJaxpr) -> dict[int, str]:
    """What each value depends on: "params", "batch", "both", "none", or "term" for scalars reduced from parameters."""
    kinds = {i: "params" if i < jaxpr.params else "batch" for i in range(jaxpr.inputs)}
    kinds |= dict.fromkeys(jaxpr.consts, "none")
    for one in jaxpr.equations:
        seen = {kinds[v] for v in one.reads}
        if "both" in seen or (seen & {"params", "term"} and "batch" in seen):
            kind = "both"
        elif seen & {"params", "term"}:
            is_reduction = one.eqn.primitive.name.startswith("reduce_") and not jaxpr.avals[one.outputs[0]].shape
            kind = "term" if "term" in seen or is_reduction else "params"
        else:
            kind = "batch" if "batch" in seen else "none"
        kinds.update(dict.fromkeys(one.outputs, kind))
    return kinds


def _links(jaxpr: FlatJaxpr, main: Sequence[int], layers: int) -> list[tuple[int, int]]:
    """The ranges of main equations that stay together: each alone, or each layer of a list."""
    if not layers:
        return [(i, i + 1) for i in range(len(main))]
    ranges: list[tuple[int, int]] = []
    for layer in range(layers):
        begin = end = ranges[-1][1] if ranges else 0
        while end < len(main) and (layer == layers - 1 or (jaxpr.equations[main[end]].label or (0, 0))[0] <= layer):
            end += 1
        ranges.append((begin, end))
    return ranges


def _crossing_bytes(
    jaxpr: FlatJaxpr, main: Sequence[int], kinds: Mapping[int, str], links: Sequence[tuple[int, int]]
) -> list[float]:
    """For each link the bytes sent if a stage begins with it."""
    last: dict[int, int] = {}
    computed_at: dict[int, int] = {}
    for k, i in enumerate(main):
        one = jaxpr.equations[i]
        last |= {v: k for v in one.reads if kinds[v] == "both"}
        computed_at |= dict.fromkeys(one.outputs, k)
    change = [0.0] * (len(main) + 2)
    for value, end in last.items():
        aval = jaxpr.avals[value]
        change[computed_at[value] + 1] += math.prod(aval.shape) * aval.dtype.itemsize
        change[end + 1] -= math.prod(aval.shape) * aval.dtype.itemsize
    crossing, total = [], 0.0
    for delta in change:
        total += delta
        crossing.append(total)
    return [crossing[min(begin, len(main))] for begin, _ in links]


def _by_marks(
    jaxpr: FlatJaxpr, main: Sequence[int], kinds: Mapping[int, str], marks: Sequence[int | None],
    paths: Sequence[str], count: int, devices: int,
) -> dict[int, int]:  # fmt: skip
    """The stage of each main equation: the latest of its inputs' stages and its own mark."""
    leaves = _leaves_under(jaxpr, kinds)
    stage_of: dict[int, int] = {}
    first: dict[int, int] = {}
    problems: list[Problem] = []
    for i in main:
        one = jaxpr.equations[i]
        before = _latest(jaxpr, stage_of, one)
        read = {leaf for v in one.reads for leaf in leaves.get(v, ())}
        marked = [m for leaf in read if leaf not in first and (m := marks[leaf]) is not None]
        stage, segment = one.label or (0, 0)
        own = segment * devices + stage
        where = f"{one.eqn.primitive.name} in staged(..., {stage}, {segment})"
        if one.label and own < before and not problems:
            problems.append(Problem(f"`staged` ops go back from stage {before} to stage {own}", where,
                                    "they read what a later stage computes",
                                    "number the stages in the order of the data"))  # fmt: skip
        if own >= count and not problems:
            problems.append(Problem(f"`staged` ops are marked for stage {own}", where, f"stages are 0 to {count - 1}",
                                    "mark them lower, or use more stages"))  # fmt: skip
        stage_of[i] = max([before, own, *marked])
        for leaf in read:
            first.setdefault(leaf, stage_of[i])
    for leaf, stage in first.items():
        if (m := marks[leaf]) is not None and m < stage:
            problems.append(Problem(f"the stage mark of `{paths[leaf]}` goes backwards", f"`{paths[leaf]}`: stage {m}",
                                    f"the first op that reads it also reads what stage {stage} computes",
                                    "number the stages in the order of the data"))  # fmt: skip
    for leaf, m in enumerate(marks):
        if m is not None and m >= count:
            problems.append(Problem(f"`{paths[leaf]}` is marked for stage {m}", f"pipeline_stages = {count}",
                                    f"stages are 0 to {count - 1}", "mark it lower, or use more stages"))  # fmt: skip
    raise_problems(problems)
    return stage_of


def _latest(jaxpr: FlatJaxpr, stage_of: Mapping[int, int], one: FlatEquation) -> int:
    """The latest stage of the equations that compute an equation's inputs."""
    return max((stage_of.get(jaxpr.makers.get(v, -1), 0) for v in one.reads), default=0)


def _leaves_under(jaxpr: FlatJaxpr, kinds: Mapping[int, str]) -> dict[int, frozenset[int]]:
    """The parameters that each value of parameters alone comes from."""
    found = {leaf: frozenset((leaf,)) for leaf in range(jaxpr.params)}
    for one in jaxpr.equations:
        if kinds[one.outputs[0]] in ("params", "term"):
            under = frozenset().union(*(found.get(v, frozenset()) for v in one.reads))
            found |= dict.fromkeys(one.outputs, under)
    return found


def _place_terms(jaxpr: FlatJaxpr, kinds: Mapping[int, str], stage_of: dict[int, int]) -> None:
    """Move loss terms of parameters alone to a stage that reads those parameters anyway."""
    leaves = _leaves_under(jaxpr, kinds)
    home: dict[int, int] = {}
    for i in sorted(stage_of):
        for v in jaxpr.equations[i].reads:
            if kinds[v] == "params":
                for leaf in leaves.get(v, ()):
                    home.setdefault(leaf, stage_of[i])
    for i, one in enumerate(jaxpr.equations):
        if kinds[one.outputs[0]] == "term":
            stage_of[i] = max([home.get(leaf, 0) for leaf in leaves[one.outputs[0]]], default=0)
    for i in sorted(stage_of):  # an equation that reads a term comes after it
        stage_of[i] = max(stage_of[i], _latest(jaxpr, stage_of, jaxpr.equations[i]))


def _empty(number: int, count: int, devices: int) -> Problem:
    """The problem of a stage without ops; with several segments the stage of a mark is one of `devices`."""
    if count <= devices:
        return Problem(f"pipeline stage {number} of {count} is empty", f"pipeline_stages = {count}", "no op has that stage",
                       "mark a part of the model with it, or use fewer stages")  # fmt: skip
    segment, stage = divmod(number, devices)
    return Problem(f"segment {segment} of pipeline stage {stage} is empty",
                   f"pipeline_stages = {devices}, interleave = {count // devices}",
                   f"each stage has {count // devices} chunks of the model, and no op has that mark",
                   f"mark a part of the model with both: pipeline_stage = {stage} and pipeline_segment = {segment} of a "
                   f"module, train.staged(f, {stage}, {segment}), or stage_config and segment_config; "
                   "or leave interleave out")  # fmt: skip


def _stages(jaxpr: FlatJaxpr, stage_of: Mapping[int, int], count: int) -> list[Stage]:
    makers = jaxpr.makers
    asked: list[set[int]] = []  # of each stage, the results of earlier stages that it reads
    content: list[tuple[tuple[FlatEquation, ...], tuple[int, ...]]] = []
    for stage in range(count):
        own = {i for i, s in stage_of.items() if s == stage}
        todo = [v for i in own for v in jaxpr.equations[i].reads]
        if stage == count - 1:
            todo += [v for v in jaxpr.outputs if not isinstance(v, core.Literal)]
        seen: set[int] = set()
        received: set[int] = set()
        while todo:
            v = todo.pop()
            if v in seen:
                continue
            seen.add(v)
            i = makers.get(v)
            if i is not None and i in stage_of:
                received |= {v} if stage_of[i] < stage else set()
            elif i is not None:
                own.add(i)
                todo += jaxpr.equations[i].reads
        asked.append(received)
        leaves = tuple(sorted(v for v in seen if v < jaxpr.params))
        content.append((tuple(jaxpr.equations[i] for i in sorted(own)), leaves))
    found = []
    for stage, (equations, leaves) in enumerate(content):
        later = set().union(*asked[stage + 1 :])
        sends = tuple(sorted(v for v in later if stage_of[makers[v]] <= stage))
        found.append(Stage(equations, leaves, sends, sum(cost_s(one.eqn) for one in equations)))
    return found


def is_inexact(aval: Any) -> bool:
    """Whether a value has a gradient."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)

"""The question and the answer of a search: one signature for every search."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shardfn.cost.devices.hardware import Hardware
from shardfn.cost.estimate import Cost, estimate_cost
from shardfn.ir.dimension_groups import dimension_groups
from shardfn.ir.model import Axes, Graph, InnerSpec, OpConstraint, Spec
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.search.problem.budget import DEFAULT, TOLERANCE
from shardfn.search.problem.graph_facts import GraphFacts, facts_of
from shardfn.search.problem.objectives import COMMUNICATION, MEMORY, TIME, Figures, Rank, rank
from shardfn.search.problem.read_as_given import constraints_as_given

OpConstraints = Mapping[int, OpConstraint]
"""Sharding constraints of ops, by their index in `Graph.ops`."""

ResultSpecs = Mapping[int, Spec]
"""Shardings of open results, by position among the results. Propagation decides the others."""

NO_RESULT_SPECS: ResultSpecs = {}


class Partitioner(Protocol):
    """Partitions the function for a mesh, a sharding of each argument, constraints of ops, and shardings of results."""

    def __call__(
        self, axes: Axes, specs: Sequence[Spec | None], constraints: OpConstraints, result_specs: ResultSpecs = ...
    ) -> PartitionedProgram:
        """The partitioned program; a spec of None leaves the argument to propagation."""
        ...


@dataclasses.dataclass(frozen=True)
class OpenResult:
    """A result whose sharding is open: its path, its value in the graph, its shape, and its position counted from the last."""

    name: str
    value: int
    shape: tuple[int, ...]
    at: int


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """MindSpore's `set_algo_parameters`: what a search may leave out.

    `fully_use_devices`: shard every op that can be sharded over all devices. `elementwise_op_strategy_follow`:
    elementwise ops take their operand's strategy (here they always do). `tensor_slice_align_size`: with `_enable`, the
    last dimension of every shard is a multiple of it. `enable_algo_approxi`, `algo_approxi_epsilon`: accept a cost within
    that part of the optimum.
    """

    fully_use_devices: bool = False
    elementwise_op_strategy_follow: bool = False
    enable_algo_approxi: bool = False
    algo_approxi_epsilon: float = 0.1
    tensor_slice_align_enable: bool = False
    tensor_slice_align_size: int = 16


@dataclasses.dataclass
class Memo:
    """Results of a problem that its copies at other levels and limits share. Each key holds all that its value depends on."""

    costs: dict[object, Cost] = dataclasses.field(default_factory=dict)
    """By the arguments of `SearchProblem.evaluate`."""
    facts: GraphFacts | None = None
    facts_written: GraphFacts | None = None
    value_groups: tuple[tuple[int, ...], ...] | None = None
    only_elementwise: tuple[bool, ...] | None = None
    """For each argument whether only elementwise ops read it."""


@dataclasses.dataclass(frozen=True)
class SearchProblem:
    """Arguments with shardings given or open (None); `axes` is the mesh of what was given, empty where that is open too.

    `groups[i][d]` is the dimension group of dimension `d` of argument `i`.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    group_bytes: Mapping[int, int]
    """For each dimension group, the bytes of all values of the program that have a dimension of it."""
    axes: Axes
    specs: tuple[Spec | None, ...]
    hardware: Hardware
    level: int
    partition: Partitioner
    """Partitions what is compiled: the program of `graph`, or that of `written`."""
    graph: Graph
    inputs: tuple[int, ...]
    """The arguments' values in `graph`."""
    results: Mapping[int, Spec]
    """Shardings that the user gave for results, by value."""
    same_as: Mapping[int, int]
    """Results, by value, that take the sharding of an argument's value."""
    donated: frozenset[int] = frozenset()
    """Arguments, by value, whose memory results reuse."""
    can_constrain: frozenset[int] = frozenset()
    """Ops, by index, that can get a sharding constraint."""
    memory_limit: float = math.inf
    """Bytes per device."""
    algorithm: Algorithm = Algorithm()
    search_ops: bool = False
    """Whether to search the shardings of ops though no argument is open: the user named a search."""
    open_results: Mapping[int, OpenResult] = dataclasses.field(default_factory=dict)
    """Results, by position, that are open and alias no argument."""
    results_requested: bool = False
    """Whether the user asked to search one of them, whatever else is open."""
    inner: Mapping[int, InnerSpec] = dataclasses.field(default_factory=dict)
    """Shardings that the user gave for values inside, by value."""
    operands: Mapping[int, InnerSpec] = dataclasses.field(default_factory=dict)
    """Shardings of the operands of sharded functions inside, cast and transposed ones too, by value: ops read them so."""
    budget: str | float = DEFAULT
    """The work of the search: a key of `budget.BUDGETS`, or a number of ops visited."""
    tolerance: float = TOLERANCE
    """The search ends when its plan is proved to cost at most this part more than the optimum; 0 for never."""
    seconds: float = math.inf
    """The user's time limit, in addition to the budget."""
    watch: Callable[[str, Any], None] | None = dataclasses.field(default=None, repr=False, compare=False)
    """Called after each evaluation with the generator's name and the `Archive`."""
    begun: float = dataclasses.field(default_factory=time.monotonic)
    """When the time limit began to count (`time.monotonic`)."""
    memo: Memo = dataclasses.field(default_factory=Memo, repr=False, compare=False)
    written: Graph | None = None
    """The program as the user wrote it, where that of `graph` has its movement as shifts. With nothing sharded it is compiled."""
    with_fewer_blocks: Callable[[], SmallerProblem | None] = dataclasses.field(
        default=lambda: None, repr=False, compare=False
    )
    """The problem of the program with fewer of its equal blocks; None where none repeat."""

    def evaluate(
        self,
        axes: Axes,
        specs: tuple[Spec, ...],
        constraints: OpConstraints,
        result_specs: ResultSpecs = NO_RESULT_SPECS,
    ) -> Cost:
        """The cost of the program as partitioned for a mesh, argument shardings, op constraints and result shardings."""
        key = axes, specs, tuple(constraints.items()), tuple(sorted(result_specs.items()))
        if key not in self.memo.costs:
            partitioned = self.partition(axes, specs, constraints, result_specs)
            self.memo.costs[key] = estimate_cost(partitioned, self.hardware, self.donated)
        return self.memo.costs[key]

    def evaluate_answer(self, candidate: SearchCandidate | Answer) -> Cost:
        """The cost of the program as partitioned for a candidate or an answer."""
        return self.evaluate(candidate.axes, candidate.specs, candidate.constraints, candidate.result_specs)

    def candidate(self, proposal: Proposal, generator: str = "") -> SearchCandidate:
        """The evaluated candidate of a proposal, in which ops read operands as the user shards them for functions inside."""
        constraints = self.as_given(proposal.axes, proposal.specs, proposal.constraints, proposal.result_specs)
        return SearchCandidate(
            proposal.name, proposal.axes, proposal.specs, constraints, proposal.result_specs, origin=proposal.origin,
            cost=self.evaluate(proposal.axes, proposal.specs, constraints, proposal.result_specs), generator=generator,
        )  # fmt: skip

    def as_given(
        self, axes: Axes, specs: tuple[Spec, ...], constraints: OpConstraints, result_specs: ResultSpecs
    ) -> OpConstraints:
        """The constraints, with others in the place of those that let an op read one of `operands` otherwise than given."""
        if not self.operands:
            return constraints
        partitioned = self.partition(axes, specs, constraints, result_specs)
        corrected = constraints_as_given(self.graph, partitioned, self.operands, self.can_constrain)
        return {**constraints, **corrected} if corrected else constraints

    def as_candidate(self, name: str, one: Answer) -> SearchCandidate:
        """An answer as an evaluated candidate."""
        return self.candidate(Proposal(name, one.axes, one.specs, one.constraints, one.result_specs))

    def partitioned_of(self, candidate: SearchCandidate | Answer) -> PartitionedProgram:
        """The partitioned program of a candidate or an answer."""
        return self.partition(candidate.axes, candidate.specs, candidate.constraints, candidate.result_specs)

    @functools.cached_property
    def updated(self) -> frozenset[int]:
        """The arguments, by value, that results replace: parameters and optimizer state."""
        return frozenset(self.same_as.values())

    def at(self, level: int) -> SearchProblem:
        """The problem with the objective of a level."""
        return self if level == self.level else dataclasses.replace(self, level=level)

    def rank(self, candidate: SearchCandidate) -> Rank:
        """`objective` of a candidate."""
        return objective(candidate.cost, self)

    def fits(self, candidate: SearchCandidate) -> bool:
        """Whether a candidate keeps the memory limit."""
        return candidate.cost.memory.peak <= self.memory_limit

    @property
    def facts(self) -> GraphFacts:
        """Facts of the graph that depend on no mesh."""
        if self.memo.facts is None:
            self.memo.facts = facts_of(self.graph, self.hardware.chip, self.donated)
        return self.memo.facts

    @property
    def facts_written(self) -> GraphFacts:
        """Those of the program as the user wrote it."""
        if self.written is None:
            return self.facts
        if self.memo.facts_written is None:
            self.memo.facts_written = facts_of(self.written, self.hardware.chip)
        return self.memo.facts_written

    @property
    def value_groups(self) -> tuple[tuple[int, ...], ...]:
        """The dimension group of each dimension of every value of the graph."""
        if self.memo.value_groups is None:
            self.memo.value_groups = dimension_groups(self.graph).of
        return self.memo.value_groups

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.hardware.count

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit; infinite without one."""
        return max(0.0, self.begun + self.seconds - time.monotonic())

    @property
    def even_s(self) -> float:
        """Seconds of an even share of the compute of the unsharded program, as it is compiled."""
        return self.facts_written.even_s(self.devices)

    @property
    def most_saved_s(self) -> float:
        """The most seconds of compute that a candidate saves by being compiled as it is written: no op costs more sharded."""
        return max(0.0, self.facts.compute_s - self.facts_written.compute_s)

    @property
    def shards_given(self) -> bool:
        """Whether the user shards an argument or a value inside."""
        return any(dim for spec in (*self.specs, *self.inner.values()) if spec for dim in spec)

    @property
    def is_open(self) -> bool:
        """Whether there is anything to search."""
        has_arguments = any(map(math.prod, filter(None, self.shapes)))
        results = bool(self.open_results) and (self.results_requested or not has_arguments)
        return self.devices > 1 and (self.search_ops or None in self.specs or results)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A choice that is not evaluated: a mesh, a sharding for each argument, constraints of ops, and shardings of open results."""

    name: str
    axes: Axes
    specs: tuple[Spec, ...]
    constraints: OpConstraints = dataclasses.field(default_factory=dict)
    result_specs: ResultSpecs = dataclasses.field(default_factory=dict)
    origin: str = dataclasses.field(default="", kw_only=True, compare=False)
    """The generator of the candidate that local search began with; empty where it is no move of the local search."""

    @functools.cached_property
    def key(self) -> object:
        """What tells it from other choices; the name does not."""
        constraints = tuple(sorted(self.constraints.items(), key=lambda item: item[0]))
        return self.axes, self.specs, constraints, tuple(sorted(self.result_specs.items()))


@dataclasses.dataclass(frozen=True)
class SearchCandidate(Proposal):
    """An evaluated choice."""

    cost: Cost = dataclasses.field(kw_only=True)
    generator: str = dataclasses.field(default="", kw_only=True)
    """The name of the generator that proposed it."""


@dataclasses.dataclass(frozen=True)
class SmallerProblem:
    """The problem of a program with fewer of its equal blocks."""

    problem: SearchProblem
    whole: Callable[[Proposal], Proposal]
    """From a proposal for it to one for the whole program."""
    text: str
    """How many blocks are planned as how many, in words."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A sharding for every argument, and for each open one the reason; `policy` says in a line how it was found.

    `source` is the `Decision.source` of what was open: "searched", or "propagated" where nothing was compared.
    """

    axes: Axes
    specs: tuple[Spec, ...]
    reasons: tuple[str, ...]
    policy: str
    runner_up: str = ""
    source: str = "searched"
    constraints: OpConstraints = dataclasses.field(default_factory=dict)
    bound_s: float | None = None
    """The least seconds that the label model allows on the meshes tried, of what the level minimises; None without a bound."""
    others: tuple[SearchCandidate, ...] = ()
    """The other evaluated candidates, best first."""
    runners_up: tuple[str, ...] = ()
    """For each argument the next best strategy and its additional cost, empty where there is none."""
    diagnostics: tuple[str, ...] = ()
    result_specs: ResultSpecs = dataclasses.field(default_factory=dict)
    """Shardings of open results that get a constraint."""


Search = Callable[[SearchProblem], Answer]


def objective(cost: Cost, problem: SearchProblem) -> Rank:
    """The rank of a cost at the problem's level: within the memory limit first, then the level's objective, then ties."""
    even_s = problem.even_s if problem.level == COMMUNICATION else 0.0  # no other level asks for it, and it takes long
    figures = Figures(
        cost.communication_s, cost.compute_s, even_s, cost.memory.peak, problem.hardware.chip.memory_bytes
    )
    return rank(problem.level, problem.memory_limit, figures)


ROUNDING = 1e-3
"""A bound may exceed a cost by this part: it holds small charges that decide between equals."""


def gap_of(cost: Cost, problem: SearchProblem, bound_s: float | None) -> float | None:
    """The part of a cost at the problem's level, 0 to 1, that may lie above a bound; 0 for what costs nothing.

    None where there is no bound, where the cost is below it, as XLA merges what the label model sums op by op, and for time
    where an op has no checked rule.
    """
    if problem.level == MEMORY or (problem.level == TIME and cost.is_lower_bound):
        return None
    if not bound_s and cost.communication_s:
        return None
    seconds = cost.time_s if problem.level == TIME else objective(cost, problem).aim[0]
    if not seconds:
        return 0.0
    return None if not bound_s or bound_s > (1 + ROUNDING) * seconds else max(0.0, 1 - bound_s / seconds)


def runner_up(best: SearchCandidate, others: Sequence[SearchCandidate]) -> str:
    """The cost of the first of the others against the best, in a line; empty without others."""
    return f"{others[0].name}: {figures(others[0].cost)} against {figures(best.cost)}" if others else ""


def figures(cost: Cost) -> str:
    """A cost in a line."""
    return f"{cost.bytes_sent:,} B sent, {cost.memory.peak:,} B peak, {cost.time_s * 1e6:,.1f} us modelled"

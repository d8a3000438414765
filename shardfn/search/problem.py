"""What a search is asked and what it answers: one signature for every search."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypedDict, Unpack

from shardfn.cost.devices.hardware import Hardware
from shardfn.cost.estimate import Cost, estimate_cost
from shardfn.ir.dimension_groups import dimension_groups
from shardfn.ir.model import Graph, OpConstraint, PartitionedProgram, Spec
from shardfn.search.effort import SearchEffort, search_effort
from shardfn.search.graph_facts import GraphFacts, facts_of
from shardfn.search.objectives import SPREAD, Rank, idle, rank
from shardfn.search.resharding_costs import Axes

OpConstraints = Mapping[int, OpConstraint]
"""Layouts that ops are held to, by their index in `Graph.ops`."""


ResultSpecs = Mapping[int, Spec]
"""Layouts that open results are held to, by their position among the results; the others lie as propagation leaves them."""


class Done(Protocol):
    """What was done on one device: a `Cost`, or the `levels.Totals` of a labelling."""

    @property
    def flops(self) -> float: ...

    @property
    def matrix_flops(self) -> float: ...


class Partitioner(Protocol):
    """Carries a full choice through the function: grid, a layout for each argument, for ops held inside, and for results."""

    def __call__(
        self, axes: Axes, specs: Sequence[Spec | None], constraints: OpConstraints, result_specs: ResultSpecs = ...
    ) -> PartitionedProgram: ...


@dataclasses.dataclass(frozen=True)
class OpenResult:
    """A result whose layout is open: its path, its value in the graph, its shape, and its place, counted from the last."""

    name: str
    value: int
    shape: tuple[int, ...]
    at: int


NO_RESULT_SPECS: ResultSpecs = {}


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """MindSpore's `set_algo_parameters`: what a search may leave out.

    `fully_use_devices`: every op that can be cut is cut over all devices. `elementwise_op_strategy_follow`: elementwise
    ops take their operand's strategy (here they always do). `tensor_slice_align_size`: with `_enable`, the last dim of
    every slice is a multiple of it. `enable_algo_approxi`, `algo_approxi_epsilon`: an answer within that part of the
    optimum will do.
    """

    fully_use_devices: bool = False
    elementwise_op_strategy_follow: bool = False
    enable_algo_approxi: bool = False
    algo_approxi_epsilon: float = 0.1
    tensor_slice_align_enable: bool = False
    tensor_slice_align_size: int = 16


@dataclasses.dataclass
class Memo:
    """What was worked out of a problem already, each where it is asked for first. A copy of the problem at another level or
    limit, or with more given, has it too: none of it depends on these, or the key tells them."""

    costs: dict[object, Cost] = dataclasses.field(default_factory=dict)
    """By all that `SearchProblem.evaluate` takes."""
    answers: dict[object, Answer] = dataclasses.field(default_factory=dict)
    """By the search, what is given, the level and the limit, and whether a first look will do (`beside.cached_search`)."""
    shares: dict[bool, float] = dataclasses.field(default_factory=dict)
    """`room.memory_lower_bound`, by whether the ops are as XLA has them."""
    facts: GraphFacts | None = None
    value_groups: tuple[tuple[int, ...], ...] | None = None
    state: tuple[bool, ...] | None = None
    """`plain.is_optimizer_state`."""


@dataclasses.dataclass(frozen=True)
class SearchProblem:
    """Arguments with layouts given or open (None); `axes` is the grid of what was given, empty where it is open too.

    `groups[i][d]` is the dimension group of dim `d` of argument `i`.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    group_bytes: Mapping[int, int]
    """Bytes of all values of the program that have a dim of a class."""
    axes: Axes
    specs: tuple[Spec | None, ...]
    hardware: Hardware
    level: int
    partition: Partitioner
    graph: Graph
    inputs: tuple[int, ...]
    """The arguments' values in `graph`."""
    results: Mapping[int, Spec]
    """Layouts that were given for results, by value."""
    same_as: Mapping[int, int]
    """Results, by value, that take the layout of an argument's value."""
    donated: frozenset[int] = frozenset()
    """Arguments, by value, whose memory results take over."""
    can_constrain: frozenset[int] = frozenset()
    """Ops, by index, that can be held to a layout."""
    memory_limit: float = math.inf
    """Bytes per device."""
    algorithm: Algorithm = Algorithm()
    search_ops: bool = False
    """Whether the layouts inside are searched though no argument is open: a search was named."""
    open_results: Mapping[int, OpenResult] = dataclasses.field(default_factory=dict)
    """Results, by position, that are open and take no argument's place."""
    results_requested: bool = False
    """Whether the user asked for one of them to be searched, whatever is open else."""
    is_quick_look: bool = False
    """Whether a first look will do, as for a large program: nothing fits anyway, and an error has to say what holds so much."""
    seconds: float = math.inf
    """After which a search answers with the best it has, where the user set a limit; else counted work bounds it."""
    begun: float = dataclasses.field(default_factory=time.monotonic)
    memo: Memo = dataclasses.field(default_factory=Memo, repr=False, compare=False)

    def evaluate(
        self,
        axes: Axes,
        specs: tuple[Spec, ...],
        constraints: OpConstraints,
        result_specs: ResultSpecs = NO_RESULT_SPECS,
    ) -> Cost:
        """What a full choice costs, by its flow."""
        key = axes, specs, tuple(constraints.items()), tuple(sorted(result_specs.items()))
        if key not in self.memo.costs:
            self.memo.costs[key] = estimate_cost(
                self.partition(axes, specs, constraints, result_specs), self.hardware, self.donated
            )
        return self.memo.costs[key]

    def evaluate_answer(self, made: SearchCandidate | Answer) -> Cost:
        """What is paid for a candidate or an answer, by its flow."""
        return self.evaluate(made.axes, made.specs, made.constraints, made.result_specs)

    def candidate(
        self,
        name: str,
        axes: Axes,
        specs: tuple[Spec, ...],
        constraints: OpConstraints,
        result_specs: ResultSpecs = NO_RESULT_SPECS,
    ) -> SearchCandidate:
        """A full choice with its price by its flow."""
        return SearchCandidate(
            name, axes, specs, constraints, self.evaluate(axes, specs, constraints, result_specs), result_specs
        )

    def again(self, made: SearchCandidate, **otherwise: Unpack[CandidateFields]) -> SearchCandidate:
        """A candidate with some of it laid out otherwise, priced again by its flow; `name` may be another one too."""
        other = dataclasses.replace(made, **otherwise)
        return dataclasses.replace(other, cost=self.evaluate_answer(other))

    def as_candidate(self, name: str, one: Answer) -> SearchCandidate:
        """An answer with its price by its flow, to be weighed against others."""
        return self.candidate(name, one.axes, one.specs, one.constraints, one.result_specs)

    def partitioned_of(self, made: SearchCandidate | Answer) -> PartitionedProgram:
        """The flow of a candidate or an answer."""
        return self.partition(made.axes, made.specs, made.constraints, made.result_specs)

    @property
    def facts(self) -> GraphFacts:
        """What holds of the graph on any grid."""
        if self.memo.facts is None:
            self.memo.facts = facts_of(self.graph, self.hardware.chip, self.donated)
        return self.memo.facts

    @property
    def value_groups(self) -> tuple[tuple[int, ...], ...]:
        """The dim class of each dim of every value of the graph."""
        if self.memo.value_groups is None:
            self.memo.value_groups = dimension_groups(self.graph).of
        return self.memo.value_groups

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.hardware.count

    @property
    def seconds_left(self) -> float:
        """Until the time limit; infinite without one."""
        return max(0.0, self.begun + self.seconds - time.monotonic())

    @property
    def effort(self) -> SearchEffort:
        """What is tried for a program of this size at this level."""
        return search_effort(len(self.graph.ops), self.level, self.is_quick_look)

    @property
    def is_small(self) -> bool:
        """`SearchEffort.is_small`."""
        return self.effort.is_small

    @property
    def is_large(self) -> bool:
        """`SearchEffort.is_large`."""
        return self.effort.is_large

    @property
    def skips_unlikely(self) -> bool:
        """`SearchEffort.skips_unlikely`."""
        return self.effort.skips_unlikely

    @property
    def model_is_partial(self) -> bool:
        """Whether only flows know all of what is sent: on TPUs, of whose sums and gathers (`graph.libtpu`) the search's model
        knows a part."""
        return self.hardware.platform == "tpu"

    def idle(self, made: Done) -> float:
        """How much of one device's work is more than spreading it evenly would leave, in hundredths; up to a tenth is none.
        Of a program whose FLOPs are for the most part those of products only these count: what is done beside them, such as
        an update that every device makes, takes no time that is worth bytes."""
        of_products = 2 * self.facts.matrix_flops > self.facts.flops
        whole, own = (self.facts.matrix_flops, made.matrix_flops) if of_products else (self.facts.flops, made.flops)
        return idle(own, SPREAD * whole / self.devices)

    @property
    def is_open(self) -> bool:
        """Whether there is anything to search."""
        return self.devices > 1 and (
            self.search_ops
            or any(spec is None for spec in self.specs)
            or (
                bool(self.open_results)
                and (self.results_requested or not any(map(math.prod, filter(None, self.shapes))))
            )
        )


class CandidateFields(TypedDict, total=False):
    """What of a candidate can be otherwise (`SearchProblem.again`)."""

    name: str
    axes: Axes
    specs: tuple[Spec, ...]
    constraints: OpConstraints
    result_specs: ResultSpecs
    follows_products: bool


@dataclasses.dataclass(frozen=True)
class SearchCandidate:
    """A full choice with its price: a layout for every argument, and for ops that are held inside."""

    name: str
    axes: Axes
    specs: tuple[Spec, ...]
    constraints: OpConstraints
    cost: Cost
    result_specs: ResultSpecs = dataclasses.field(default_factory=dict)
    follows_products: bool = False
    """Whether what no product reads was laid out as what products make (`polish.follow_products`)."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A layout for every argument, and for each open one the reason; `policy` says in a line how it was found.

    `source` is the `Decision.source` of what was open: "searched", or "propagated" where nothing was weighed.
    """

    axes: Axes
    specs: tuple[Spec, ...]
    reasons: tuple[str, ...]
    policy: str
    runner_up: str = ""
    source: str = "searched"
    constraints: OpConstraints = dataclasses.field(default_factory=dict)
    gap: float | None = None
    """How much of the cost, 0 to 1, may lie above the least of the cost model, op by op, on the grids tried, at level 0 on its
    own: 0 is proved, None not known."""
    others: tuple[SearchCandidate, ...] = ()
    """What else was priced, best first."""
    variants: tuple[SearchCandidate, ...] = ()
    """What was priced of the same layouts with more or less held inside."""
    runners_up: tuple[str, ...] = ()
    """For each argument the next best cut and what it would cost more, empty where there is none."""
    diagnostics: tuple[str, ...] = ()
    result_specs: ResultSpecs = dataclasses.field(default_factory=dict)
    """Layouts that open results are held to."""
    is_uncertain: bool = False
    """Whether no flow of what was found did what the model promised, or a plain layout had a better one by a good part."""


Search = Callable[[SearchProblem], Answer]


def objective(cost: Cost, problem: SearchProblem) -> Rank:
    """What the problem's level makes least, within the memory limit first, and what decides between equals."""
    idle, sent, peak = problem.idle(cost), cost.bytes_sent, cost.memory.peak
    return rank(problem.level, problem.memory_limit, idle=idle, sent=sent, time_s=cost.time_s, peak=peak)


def runner_up(best: SearchCandidate, others: Sequence[SearchCandidate]) -> str:
    """What the first of the others costs against the best, in a line; empty without others."""
    return f"{others[0].name}: {figures(others[0].cost)} against {figures(best.cost)}" if others else ""


def figures(cost: Cost) -> str:
    """What a layout costs, in a line."""
    return f"{cost.bytes_sent:,} B sent, {cost.memory.peak:,} B peak, {cost.time_s * 1e6:,.1f} us modelled"

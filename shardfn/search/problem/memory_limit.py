"""Memory limits: notes on plans near them, and the errors on limits that no plan keeps."""

from __future__ import annotations

from typing import NoReturn

from shardfn.cost.memory.live_memory import MemoryEstimate, live_memory
from shardfn.errors import StrategyError, fail
from shardfn.ir.source_lines import source_line
from shardfn.search.problem.graph_facts import array_bytes
from shardfn.search.problem.search_problem import Answer, SearchProblem
from shardfn.units import bytes_text

NAMED = 4
"""Arrays that an error names."""

IMPLAUSIBLE = 100
"""A limit this many times below an even share of the arguments is a slip of the unit."""

ERROR = 0.25
"""Relative error of the predicted peak, measured in `benchmarks/truth.py`."""


def near_limit_note(memory: MemoryEstimate, limit: float) -> list[str]:
    """A note on a plan that keeps a limit by less than the model's error. Arguments and results are exact; only temporaries
    can be wrong.

    >>> near_limit_note(MemoryEstimate(600, 100, 200), 1e6), len(near_limit_note(MemoryEstimate(600, 100, 200), 1000))
    ([], 1)
    """
    if not memory.peak <= limit < memory.peak + min(memory.temporaries, ERROR * memory.peak):
        return []
    return [
        f"near the memory limit: the predicted peak is {memory.peak:,} of {limit:,.0f} bytes per device, {memory.temporaries:,} "
        f"of them temporaries, and the prediction may be {ERROR:.0%} too low: compile_candidates=4 keeps the limit as compiled, "
        "and plan.verify() compares this plan with what XLA compiles"
    ]


def refuse_limit(problem: SearchProblem, answer: Answer) -> None:
    """Refuse the problem's memory limit if an answer exceeds it: the answer is the best of all candidates, so none keeps it.

    Raises:
      StrategyError: it names the least memory found and the largest arrays.
    """
    if not _fits(problem, answer):
        _refuse(problem, answer)


def refuse_implausible_limit(problem: SearchProblem) -> None:
    """Refuse a user's limit that is so small that its unit must be a slip.

    Raises:
      StrategyError: it says how large the arguments are.
    """
    graph = problem.graph
    given = sum(array_bytes(graph.values[v]) for v in graph.inputs)
    if problem.memory_limit * IMPLAUSIBLE < given / problem.devices:
        fail(StrategyError, f"no plan fits in {bytes_text(problem.memory_limit)} per device",
             where=f"memory_limit = {problem.memory_limit:,.0f}",
             why=f"the arguments alone, however sharded, take at least {bytes_text(given / problem.devices)} on each device",
             fix=unit_slip(problem.memory_limit)
             or 'write the unit that is meant, as in "14GiB" or "16GB", or leave memory_limit out')  # fmt: skip


def _refuse(problem: SearchProblem, least: Answer) -> NoReturn:
    """Raise that nothing fits, with the least memory found, its largest arrays, and what helps."""
    memory = problem.evaluate_answer(least).memory
    unit = f"{slip}; or " if (slip := unit_slip(problem.memory_limit)) else ""
    fail(StrategyError, f"no plan found fits in {bytes_text(problem.memory_limit)} per device",
         where=f"memory_limit = {problem.memory_limit:,.0f}",
         why=f"the least found is {bytes_text(memory.peak)}: {bytes_text(memory.arguments)} of arguments, "
             f"{bytes_text(memory.results)} of results ({bytes_text(memory.donated)} in donated arguments' memory) and "
             f"{bytes_text(memory.temporaries)} of temporaries; the largest: " + "; ".join(_largest(problem, least))
             + (f"; {bytes_text(memory.constants)} of arrays that the function closes over, on every device"
                if memory.constants else ""),
         fix=unit + f"{remedies(problem, memory)} or memory_limit={memory.peak}")  # fmt: skip


def unit_slip(limit: float) -> str:
    """The fix of a limit that must have been meant with another unit, or with one: it is less than a KiB.

    >>> unit_slip(16), unit_slip(1024)
    ('did you mean memory_limit="16GiB"? The limit is 16 B', '')
    """
    return f'did you mean memory_limit="{limit:.0f}GiB"? The limit is {bytes_text(limit)}' if limit < 1024 else ""


def remedies(problem: SearchProblem, memory: MemoryEstimate) -> str:
    """What takes less memory, as far as it can help this program: results that replace arguments are those of a step."""
    donate = ["donate_argnums for updated arguments"] if problem.updated - problem.donated else []
    keeps = ["jax.checkpoint for what the backward pass keeps"] if problem.updated else []
    shards = ['closed_over="argument" to shard what the function closes over'] if memory.constants else []
    is_of_matmuls = any(op.name in ("dot_general", "convolution") for op in problem.graph.ops)  # else there is no batch
    smaller = "a smaller batch" if is_of_matmuls else "smaller arrays"
    return ", ".join(["use more devices", smaller, *donate, *keeps, *shards]) + ","


def _fits(problem: SearchProblem, answer: Answer) -> bool:
    return problem.evaluate_answer(answer).memory.peak <= problem.memory_limit


def _largest(problem: SearchProblem, answer: Answer) -> list[str]:
    """The largest arrays at an answer's memory peak: what each is, the line it comes from, and bytes on one device. Equal
    ones of a line are one entry."""
    live = live_memory(problem.partitioned_of(answer), problem.donated, problem.hardware.chip)
    graph, alive = live.partitioned.graph, live.held_at_peak
    names = {v: f"`{name}`" for v, name in zip(graph.arguments(len(problem.names)), problem.names, strict=True)}
    counts: dict[tuple[int, str], int] = {}
    for values, size in alive:
        text = "a copy by XLA"
        if values:
            v = next((v for v in values if v in names or v in graph.makers), values[0])
            maker, at = graph.maker(v), source_line(graph, v)
            name = names.get(v) or (maker.name if maker else "captured" if v in graph.inputs else "carried")
            text = f"{name} {graph.values[v]}{at and f' at {at}'}"
        key = -size, text
        counts[key] = counts.get(key, 0) + 1
    return [
        f"{text}: {bytes_text(-size)}" + (f", {counts[size, text]} of them" if counts[size, text] > 1 else "")
        for size, text in sorted(counts)[:NAMED]
    ]

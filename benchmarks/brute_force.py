"""Does any sharding of whole dimension groups beat the plan? The gallery's models at their tests' size on 8 devices.

Such a sharding gives each axis of a mesh some dimension groups, and each argument the axes of its groups: data, tensor, sequence
and expert parallelism and their mixes are among them. Up to --most of them are evaluated for each model, all small sets of the
groups with the most bytes and a random sample of the others. Printed is what the plan of each level costs over the best of
them, both as predicted: more than 1 says that the search missed a better plan.
Run: python benchmarks/brute_force.py [--only NAME ...] [--most 400] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import shardfn
from benchmarks import harness
from examples.gallery import NAMES, Program
from shardfn.ir.model import Axes
from shardfn.search import BASELINES, GENERATORS
from shardfn.search.engine import run
from shardfn.search.moves import argument_specs
from shardfn.search.problem import Proposal, SearchCandidate, SearchProblem

DEVICES = 8
MESHES: tuple[Axes, ...] = ((("x", 8),), (("x", 2), ("y", 4)), (("x", 4), ("y", 2)))
GROUPS, TOGETHER = 6, 3
"""Of the dimension groups those with the most bytes, and how many of them one axis shards."""
LEVELS = (0, 1, 2)


def assignments(problem: SearchProblem, most: int) -> Iterator[tuple[Axes, tuple[frozenset[int], ...]]]:
    """Meshes, with the dimension groups of each axis: all with at most two in all, then a random sample, `most` together."""
    largest = sorted(problem.group_bytes, key=lambda group: (-problem.group_bytes[group], group))
    inside = {group for groups in problem.groups for group in groups}
    groups = [group for group in largest if group in inside][:GROUPS]
    sets = [frozenset(of) for n in range(TOGETHER + 1) for of in itertools.combinations(groups, n)]
    every = [(axes, choice) for axes in MESHES for choice in itertools.product(sets, repeat=len(axes))]
    few = [one for one in every if sum(map(len, one[1])) <= 2]
    more = [one for one in every if sum(map(len, one[1])) > 2]
    rest = max(0, most - len(few))
    yield from few[:most]
    yield from random.Random(0).sample(more, min(rest, len(more)))


def by_group(axes: Axes, assigned: tuple[frozenset[int], ...]) -> dict[int, tuple[str, ...]]:
    """The axes of each dimension group.

    >>> by_group((("x", 2), ("y", 4)), (frozenset({1}), frozenset({1, 3})))
    {1: ('x', 'y'), 3: ('y',)}
    """
    names = [name for name, _ in axes]
    groups = sorted(frozenset[int]().union(*assigned))
    return {group: tuple(n for n, of in zip(names, assigned, strict=True) if group in of) for group in groups}


def least_by_brute_force(problem: SearchProblem, most: int) -> tuple[int, list[float]]:
    """How many shardings were evaluated, and the least cost at each level."""
    least = [math.inf] * len(LEVELS)
    seen = set[object]()
    for axes, assigned in assignments(problem, most):
        specs = argument_specs(problem, axes, by_group(axes, assigned))
        if (axes, specs) not in seen:
            seen.add((axes, specs))
            candidate = problem.candidate(Proposal("brute force", axes, specs))
            least = [min(cost, aim(problem, level, candidate)) for level, cost in zip(LEVELS, least, strict=True)]
    return len(seen), least


def aim(problem: SearchProblem, level: int, candidate: SearchCandidate) -> float:
    """The figure that a level minimises: seconds of communication and unbalanced compute, peak bytes, seconds with the charge for
    memory."""
    return problem.at(level).rank(candidate).aim[0]


def row(name: str, program: Program, most: int) -> dict[str, Any]:
    """The plan of each level over the best by brute force, without entries and limits."""
    plan = shardfn.plan(
        program.unsharded or program.function, *program.arguments, search_mode="sharding_propagation",
        donate_argnums=program.options.get("donate_argnums", ()),
    )  # fmt: skip
    problem = dataclasses.replace(plan._answered.problem, memory_limit=math.inf)
    archives = [run(problem.at(level), GENERATORS[level], BASELINES) for level in LEVELS]
    evaluated, least = least_by_brute_force(problem, most)
    own = [aim(problem, level, archive.best(level)) for level, archive in zip(LEVELS, archives, strict=True)]
    ratios = {
        f"level {level}": mine / best if best else math.inf if mine else 1.0
        for level, mine, best in zip(LEVELS, own, least, strict=True)
    }
    return {
        "model": name,
        "ops": len(problem.graph.ops),
        "candidates": sum(map(len, archives)),
        "brute force": evaluated,
        **ratios,
    }


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--most", type=int, default=400)
    options = harness.parse(parser, devices=DEVICES)
    rows = []
    for name in options.only:
        try:
            module = importlib.import_module(f"examples.gallery.{name}")
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        rows.append(row(name, module.program("tiny"), options.most))
        harness.show(rows[-1:])
    harness.show(rows)
    harness.save(options.json, {"models": rows})


if __name__ == "__main__":
    main()

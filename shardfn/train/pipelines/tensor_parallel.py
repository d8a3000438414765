"""Cuts of parameters within a pipeline stage: entries by path to one dim of each leaf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardfn.errors import Problem
from shardfn.frontend.paths import met, unmet
from shardfn.frontend.strategy import short


def tensor_cuts(
    paths: Sequence[str], shapes: Sequence[tuple[int, ...]], plan: Mapping[str, Any]
) -> tuple[list[int], int, list[Problem]]:
    """For each leaf the dim that is cut, -1 for none; over how many devices; and what is wrong with the plan.

    >>> tensor_cuts(["up", "down", "b"], [(4, 8), (8, 4), (4,)], {"up": (1, 2), "down": (2, 1)})
    ([1, 0, -1], 2, [])
    """
    dims, ways = [-1] * len(paths), 1
    problems = list(unmet("parameter_plan", plan, paths))
    for glob, entry in plan.items():
        where = f"parameter_plan[{glob!r}] = {short(entry)}"
        hits, _ = met(glob, paths)
        if not isinstance(entry, tuple | list) or not all(type(n) is int and n > 0 for n in entry):
            problems.append(Problem("a cut within a stage is a tuple of ints from 1 up", where,
                                    "it says how many ways each dim is cut", "write one as (1, 2)", is_type=True))  # fmt: skip
            continue
        cut = [d for d, n in enumerate(entry) if n > 1]
        if len(cut) > 1 or (cut and ways not in (1, entry[cut[0]])):
            other = f"others are cut {ways} ways" if len(cut) == 1 else "it cuts more than one dim"
            problems.append(Problem("cuts within a stage share one axis of devices", where, other,
                                    "cut one dim of each parameter, all of them equally often"))  # fmt: skip
            continue
        if not cut:
            continue
        ways = entry[cut[0]]
        for i in hits:
            name = f"`{paths[i]}`: {list(shapes[i])}"
            if len(entry) != len(shapes[i]):
                problems.append(Problem(f"`{paths[i]}` has {len(shapes[i])} dims, its entry {len(entry)}", where, name,
                                        "write one int for each dim"))  # fmt: skip
            elif shapes[i][cut[0]] % ways:
                divisors = [str(n) for n in range(2, ways) if math.gcd(n, shapes[i][cut[0]]) == n]
                problems.append(Problem(f"`{paths[i]}` cannot be cut {ways} ways along dim {cut[0]}", where,
                                        f"{shapes[i][cut[0]]} is not divisible by {ways}",
                                        f"use {' or '.join(divisors)}" if divisors else "leave it whole"))  # fmt: skip
            else:
                dims[i] = cut[0]
    return dims, ways, problems

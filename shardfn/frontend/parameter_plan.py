"""Entries of single arrays by their paths: `parameter_plan`."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from shardfn.errors import Problem, a, did_you_mean
from shardfn.frontend.closed_over import option_for
from shardfn.frontend.paths import listed, met, met_by_end, near, normal, ruled, tidy
from shardfn.frontend.strategy import ENTRY_KINDS, Leaf, PassedOn, is_entry, short, with_entry


def apply_parameter_plan(
    leaves: Sequence[Leaf], plan: Any, problems: list[Problem], name: str = "parameter_plan"
) -> list[Leaf]:
    """Override entries by path glob. `.` and `/` separate alike, a leading `self.` and the argument's name are optional.

    Args:
      leaves: the arrays.
      plan: entries by glob; None overrides nothing.
      problems: receives what is wrong with them.
      name: what the plan is called in errors.
    """
    if plan is None:
        return list(leaves)
    if not isinstance(plan, dict):
        problems.append(Problem(f"`{name}` must be a dict from path to entry, but it is {a(plan)}",
                                f"{name} = {short(plan)}", "it gives single arrays entries, by their paths",
                                f'write it as {name}={{"params/w1": (1, 4)}}', is_type=True))  # fmt: skip
        return list(leaves)
    full = [leaf.path if leaf.path.startswith("self/") else normal(leaf.path) for leaf in leaves]
    globs, own = list[str](), dict[int, str]()
    where = {
        pattern: entry.where if isinstance(entry, PassedOn) else f"{name}[{pattern!r}]"
        for pattern, entry in plan.items()
    }
    plan = {pattern: entry.entry if isinstance(entry, PassedOn) else entry for pattern, entry in plan.items()}
    said = {pattern: f"{where[pattern]} = {short(entry)}" for pattern, entry in plan.items()}
    for pattern, entry in plan.items():
        if not isinstance(pattern, str):
            problems.append(Problem(f"a key of `{name}` is {a(pattern)}", said[pattern],
                                    "a key is the path of an array, or a glob of paths",
                                    'write a string there, such as "params/w1"', is_type=True))  # fmt: skip
        elif not is_entry(entry) or isinstance(entry, str | int | float):
            likely = tuple(entry) if isinstance(entry, list) and all(type(e) is int for e in entry) else (1, 4)
            problems.append(Problem(f"a value of `{name}` is {a(entry)}", said[pattern], ENTRY_KINDS,
                                    f"write {where[pattern]} = {likely!r}", is_type=True))  # fmt: skip
        elif pattern.startswith(("self.", "self/")) and (path := f"self/{normal(pattern)}") in full:
            own[full.index(path)] = pattern  # an attribute that has the name of an argument
        else:
            globs.append(pattern)
    found = ruled(globs, full, lambda one, two: plan[globs[one]] == plan[globs[two]], _met_in_cell)
    problems += [no_such_array(globs[rule], plan[globs[rule]], full, name) for rule in found.missing]
    for i, one, two in found.clashes:
        problems.append(Problem(f"two rules of `{name}` speak of `{leaves[i].path}`",
                                f"{said[globs[one]]} and {said[globs[two]]}",
                                "an array has one entry, and no rule comes before the other",
                                "make one of the globs narrower, or name the path itself"))  # fmt: skip
    rule_of = {i: globs[rule] for i, rule in found.rules.items()} | own
    return [
        with_entry(leaf, plan[rule_of[i]], where[rule_of[i]]) if i in rule_of else leaf for i, leaf in enumerate(leaves)
    ]


def no_such_array(pattern: str, entry: Any, paths: Sequence[str], name: str = "parameter_plan") -> Problem:
    """The problem of a path or glob that meets none of the `paths`, with those that look like it."""
    otherwise = "use one of these paths, or a glob that meets them: * stands for any part"
    ends = [paths[i] for i in met_by_end(pattern, paths)[:3]]
    fix = option_for(pattern, paths) or did_you_mean(ends or near(pattern, paths)) or otherwise
    return Problem(f"`{name}` names `{pattern}`, which is no array of this call", f"{name}[{pattern!r}] = {short(entry)}",
                   f"the arrays are {listed(paths)}", fix)  # fmt: skip


def _met_in_cell(pattern: str, paths: Sequence[str]) -> tuple[list[int], str]:
    """`met`, and MindSpore's paths too, which it writes from the class around the Cell: `self.block.w` for `w`. Then the one path
    with that end."""
    hits, glob = met(pattern, paths)
    if not hits and pattern.startswith("self."):
        rest = glob.partition("/")[2]
        hits = [i for i in met(rest, paths)[0] if fnmatch.fnmatchcase(tidy(paths[i]), tidy(rest))]  # whole paths alone
        glob = rest if hits else glob
    ends = [] if hits else met_by_end(pattern, paths)
    return (ends, paths[ends[0]]) if len(ends) == 1 else (hits, glob)

"""How the rules of a layout file apply to arrays.

`match_rules` finds the rule of each array, `mesh_axes` the sizes of the mesh axes, and `rule_entry` the sharding of one array.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from shardfn.errors import Problem, closest, did_you_mean
from shardfn.frontend.closed_over import option_for
from shardfn.frontend.meshes import MeshLayout
from shardfn.frontend.paths import Ruled, escaped, listed, near, normal, ruled
from shardfn.frontend.strategy import AUTO, Leaf, count
from shardfn.frontend.validation import NAMED_DIVISORS, any_of, check_strategy
from shardfn.ir.divisors import divisors
from shardfn.ir.model import Axes, Spec
from shardfn.ir.specs import strategy_of
from shardfn.planning.layout_rules.layout_file import ELLIPSIS, LayoutFile, LayoutRule, RuleDim, at_line

MAX_REPORTED = 20
"""Problems of one kind that are reported one by one; the rest are counted."""


def mesh_axes(layout: LayoutFile, devices: int, problems: list[Problem]) -> Axes:
    """The mesh axes with every size known; on one device every size is 1.

    Args:
      layout: the layout file.
      devices: the device count.
      problems: receives a mesh that does not fit the devices.
    """
    if devices == 1:
        return tuple((name, 1) for name, _ in layout.mesh)
    fixed = math.prod(size for _, size in layout.mesh if size is not None)
    is_open = any(size is None for _, size in layout.mesh)
    if layout.mesh and (devices % fixed if is_open else fixed != devices):
        can = any_of(divisors(devices)[:NAMED_DIVISORS])
        fix = f"use a multiple of {fixed} devices, or sizes whose product is {can}"
        if not is_open:
            fix = (f'use {fixed} devices, or change [mesh]: sizes with a product of {devices}, or an axis left to the '
                   f'device count, {layout.mesh[0][0]} = "left"')  # fmt: skip
        text = " x ".join(f"{name}={size or 'left'}" for name, size in layout.mesh)
        where = f"{at_line(layout.name, layout.lines.get('mesh', 0))}: [mesh] {text}"
        why = f"{devices} is not divisible by {fixed}" if is_open else "the product of the axes is the device count"
        found = Problem(f"the mesh of {layout.name} has {fixed} devices{' in its fixed axes' if is_open else ''}, but there are "
                        f"{devices}", where, why, fix)  # fmt: skip
        if found not in problems:  # arguments and results are checked one after the other
            problems.append(found)
        return tuple((name, size or 1) for name, size in layout.mesh)
    return tuple((name, devices // fixed if size is None else size) for name, size in layout.mesh)


def match_rules(
    layout: LayoutFile, section: str, leaves: Sequence[Leaf], problems: list[Problem]
) -> dict[int, LayoutRule]:
    """The rule of each leaf that one matches, by the leaf's position. An exact path takes precedence over a glob.

    Args:
      layout: the layout file.
      section: "arguments", "results" or "activations".
      leaves: the arrays.
      problems: receives rules that match no array, and arrays that two rules match.
    """
    rules: tuple[LayoutRule, ...] = getattr(layout, section)
    paths = [normal(leaf.path) for leaf in leaves]
    found = _ruled(layout, rules, paths)
    if layout.every_rule_matches:
        missing = [rules[i] for i in found.missing if not rules[i].optional]
        _report((_no_match(rule, paths, section, layout.name) for rule in missing), len(missing),
                "rules that match no array", layout.name, problems)  # fmt: skip
    clashes = (_two_rules(leaves[i], rules[one], rules[two], section, layout.name) for i, one, two in found.clashes)
    _report(clashes, len(found.clashes), "arrays that two rules match", layout.name, problems)
    return {i: rules[rule] for i, rule in found.rules.items()}


def unmatched_note(layout: LayoutFile, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """A note on the rules that match no array, of a file that need not be for this function; "" where there are none.

    >>> layout = LayoutFile(arguments=(LayoutRule("w", (2,)), LayoutRule("bias", (1,))), name="plan.toml")
    >>> unmatched_note(layout, ["x", "w"], ["result"])
    'plan.toml has 1 rule that matches no array of this call: bias; the arrays are x, w'
    """
    missing: list[str] = []
    for rules, paths in ((layout.arguments, inputs), (layout.results, outputs)):
        found = _ruled(layout, rules, [normal(path) for path in paths])
        missing += [printable(rules[i].glob) for i in found.missing if not rules[i].optional]
    match = "rule that matches" if len(missing) == 1 else "rules that match"
    text = f"{layout.name} has {len(missing)} {match} no array of this call: {listed(missing)}"
    return f"{text}; the arrays are {listed([*inputs])}" if missing else ""


_TRAINED = "state/", "state/params/"
"""How the paths of parameters begin in the plan of a training step."""


def _ruled(layout: LayoutFile, rules: Sequence[LayoutRule], paths: Sequence[str]) -> Ruled:
    """Which rule has which array, by their positions. Where the file need not be for this function, a rule for a parameter of a
    training step that matches no array is one for the parameter of that path in any argument.

    >>> rules = [LayoutRule("state/params/w", (2,)), LayoutRule("state/step", ())]
    >>> _ruled(LayoutFile(every_rule_matches=False), rules, ["model/w", "x"])
    Ruled(rules={0: 0}, missing=(1,), clashes=())
    """

    def same(one: int, two: int) -> bool:
        return rules[one].sharding == rules[two].sharding

    found = ruled([rule.glob for rule in rules], paths, same)
    for start in () if layout.every_rule_matches else _TRAINED:
        left = [i for i in found.missing if rules[i].glob.startswith(_TRAINED[-1])]
        bare = [i for i in range(len(paths)) if i not in found.rules]
        ends = [rules[i].glob.removeprefix(start) for i in left]
        more = ruled(ends, [paths[i] for i in bare], lambda one, two, left=left: same(left[one], left[two]))
        missing = {left[i] for i in more.missing}
        found = Ruled(
            found.rules | {bare[path]: left[rule] for path, rule in more.rules.items()},
            tuple(i for i in found.missing if i in missing or i not in left),
            (*found.clashes, *((bare[path], left[one], left[two]) for path, one, two in more.clashes)),
        )
    return found


def printable(text: str) -> str:
    """A text with `?` for characters that are not printable: they could control a terminal.

    >>> printable("a\x1b[2J")
    'a?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def _report(found: Iterable[Problem], total: int, what: str, name: str, problems: list[Problem]) -> None:
    """Add the first of some problems, and how many more there are."""
    problems += itertools.islice(found, MAX_REPORTED)
    if total > MAX_REPORTED:
        problems.append(Problem(f"there are {total - MAX_REPORTED} more {what}", name, fix="fix those above first"))


def _no_match(rule: LayoutRule, paths: Sequence[str], section: str, name: str) -> Problem:
    close = near(rule.glob, paths)
    fix = did_you_mean(close) or "correct the path."
    if option := option_for(rule.glob, paths):
        fix = f"{option}."
    return Problem(f"a rule of {name} matches no array: `{printable(rule.glob)}`", f"{at_line(name, rule.line)}: [{section}]",
                   f"the arrays are {listed(paths)}", f"{fix} Or remove the rule, or add optional = true to it")  # fmt: skip


def _two_rules(leaf: Leaf, one: LayoutRule, two: LayoutRule, section: str, name: str) -> Problem:
    where = f"{one.where(name, section)} and {two.where(name, section).removeprefix(name).lstrip(': ')}"
    return Problem(f"two rules of {name} match `{leaf.path}`", where,
                   "an array has one sharding, and neither glob takes precedence",
                   "make one glob narrower, or add a rule for the exact path: it takes precedence over every glob")  # fmt: skip


def report_uncovered(leaves: Sequence[Leaf], name: str, problems: list[Problem]) -> None:
    """Report the arrays that no rule matches."""
    found = (
        Problem(f"no rule of {name} matches `{leaf.path}`", leaf.text,
                "here the layout file alone decides: no search shards the other arrays",
                f'add a rule: "{escaped(leaf.path)}" = [{", ".join("1" for _ in leaf.shape)}], '
                'or others = "replicated" for all of them')
        for leaf in leaves
    )  # fmt: skip
    _report(found, len(leaves), "arrays without a rule", name, problems)


def rule_entry(rule: LayoutRule, leaf: Leaf, axes: Axes, devices: int, where: str, problems: list[Problem]) -> Any:
    """The entry of a leaf: mesh axes for each dimension (a `Spec`), numbers of shards (a strategy), or AUTO.

    Args:
      rule: the rule that matches the leaf.
      leaf: the array.
      axes: the mesh axes, sizes known.
      devices: the device count; on one device every array is replicated, and only the form of the rule is checked.
      where: the rule's place, for errors.
      problems: receives a rank, an axis or a number of shards that does not fit.
    """
    if rule.sharding is None:
        return AUTO
    leaf = dataclasses.replace(leaf, entry=list(rule.sharding), where=where)
    dims = _expanded(rule.sharding, len(leaf.shape))
    if dims is None or (rule.dims and len(rule.dims) != len(leaf.shape)):
        problems.append(_rank(rule, leaf))
        return AUTO
    if rule.rows and tuple(leaf.shape[:2]) != (len(rule.rows), max(rule.rows)):
        padded = [len(rule.rows), max(rule.rows)]
        problems.append(Problem(f"{leaf.label} does not have the rows of its rule", leaf.source,
                                f"the padded table starts with the dimensions {padded}, the array has {list(leaf.shape)}",
                                "pack the table with these rows, or correct them"))  # fmt: skip
        return AUTO
    if not rule.has_axes and (not axes or rule.has_counts):
        strategy = check_strategy(leaf, tuple(dims), devices, problems)
        return AUTO if strategy is None else strategy
    spec = _spec(dims, leaf, dict(axes), problems)
    if spec is None:
        return AUTO
    if devices == 1:
        return (1,) * len(leaf.shape)
    strategy = strategy_of(spec, axes)
    return AUTO if check_strategy(leaf, strategy, devices, problems) is None else spec


def _expanded(sharding: Sequence[RuleDim], ndim: int) -> list[RuleDim] | None:
    """One entry for each dimension of an array; None where the ranks differ."""
    dims = list(sharding)
    if ELLIPSIS in dims:
        at = dims.index(ELLIPSIS)
        dims[at : at + 1] = [1] * (ndim - len(dims) + 1)
    return dims if len(dims) == ndim else None


def _rank(rule: LayoutRule, leaf: Leaf) -> Problem:
    have = len(rule.dims) if rule.dims else len(rule.sharding or ()) - (ELLIPSIS in (rule.sharding or ()))
    what = f"{leaf.label} has {count(len(leaf.shape), 'dimension', 'dimensions')}, but its rule has {have}"
    return Problem(what, leaf.source, 'a rule has one entry for each dimension; "..." stands for any number of unsharded ones',
                   f"write {len(leaf.shape)} entries, or narrow the glob {rule.glob!r} so that it does not match this "
                   "array")  # fmt: skip


def _spec(dims: Sequence[RuleDim], leaf: Leaf, sizes: dict[str, int], problems: list[Problem]) -> Spec | None:
    spec: list[tuple[str, ...]] = []
    used: set[str] = set()
    for d, (dim, size) in enumerate(zip(dims, leaf.shape, strict=True)):
        kept: list[str] = []
        for written in dim if isinstance(dim, tuple) else () if isinstance(dim, int) else (dim,):
            name = written.removesuffix("?")
            if name not in sizes:
                fix = did_you_mean(closest(name, sizes, 0.5)) or "use one of these axes, or 1 for unsharded"
                problems.append(Problem(f"{leaf.label} is sharded over `{name}`, which is no mesh axis", leaf.source,
                                        f"the axes are {', '.join(sizes) or 'none'}", fix))  # fmt: skip
                return None
            if written != name and size % math.prod([sizes[name], *(sizes[a] for a in kept)]):
                continue
            if name in used:
                problems.append(Problem(f"two dimensions of {leaf.label} use the axis `{name}`", leaf.source,
                                        "a mesh axis shards at most one dimension of an array",
                                        f"give dimension {d} another axis, or leave it unsharded"))  # fmt: skip
                return None
            used.add(name)
            kept.append(name)
        spec.append(tuple(kept))
    return tuple(spec)


def as_layout(spec: Spec, axes: Axes, order: Sequence[int] | None) -> MeshLayout:
    """The layout of one array on the mesh."""
    return MeshLayout(tuple(axes), spec, tuple(order or range(math.prod(size for _, size in axes))))


def rule_entries(
    layout: LayoutFile, leaves: Sequence[Leaf], devices: int, problems: list[Problem], section: str = "arguments",
    given: Sequence[str] = (),
) -> tuple[Axes, list[tuple[Any, str]]]:  # fmt: skip
    """The mesh axes, and for each leaf the entry that the file gives it (as `rule_entry`) and its place in the file.

    Args:
      layout: the layout file.
      leaves: the arrays.
      devices: the device count.
      problems: receives everything that does not fit.
      section: "arguments" or "results".
      given: the names of the arguments that are data: `batch` applies to those none of whose arrays has a rule.
    """
    axes = mesh_axes(layout, devices, problems)
    count = math.prod(size for _, size in axes) if axes else devices  # a mesh that does not fit is reported once
    rules = match_rules(layout, section, leaves, problems)
    owners = [next((name for name in given if f"{leaf.path}/".startswith(f"{name}/")), None) for leaf in leaves]
    ruled = {owners[i] for i in rules}
    entries: list[tuple[Any, str]] = []
    bare: list[Leaf] = []
    faults: dict[tuple[str, str, str], list[Problem]] = {}  # one fault of a rule, for all arrays that have it
    for i, leaf in enumerate(leaves):
        rule = rules.get(i)
        if rule is None and section == "arguments":
            if layout.batch is not None and owners[i] is not None and owners[i] not in ruled:
                sharding = (*layout.batch[: len(leaf.shape)], *(1,) * (len(leaf.shape) - len(layout.batch)))
                rule = LayoutRule("batch", sharding, line=layout.lines.get("batch", 0))
            elif layout.others is not None:
                rule = LayoutRule("others", layout.others, line=layout.lines.get("others", 0))
        if section == "arguments" and layout.every_array_ruled and (rule is None or rule.sharding is None):
            bare.append(leaf)
        if rule is None:
            entries.append((AUTO, ""))
            continue
        mine: list[Problem] = []
        entry = rule_entry(rule, leaf, axes, count, rule.where(layout.name, section), mine)
        for problem in mine:
            faults.setdefault((rule.glob, problem.what.replace(leaf.label, ""), problem.why), []).append(problem)
        entries.append((entry, f"{layout.name}: {rule.glob}"))
    for first, *more in faults.values():
        where = f"{first.where}, and {len(more)} more array{'s'[: len(more) != 1]}" if more else first.where
        problems.append(dataclasses.replace(first, where=where))
    report_uncovered(bare, layout.name, problems)
    return axes, entries


def with_layout(
    layout: LayoutFile, leaves: Sequence[Leaf], devices: int, problems: list[Problem], section: str = "arguments",
    given: Sequence[str] = (),
) -> list[Leaf]:  # fmt: skip
    """The arrays of a call, or its results; the file gives an entry to each that has none. Arguments as `rule_entries`."""
    before = len(problems)
    axes, entries = rule_entries(layout, leaves, devices, problems, section, given)
    if len(problems) > before or (axes and devices != math.prod(size for _, size in axes)):
        return list(leaves)
    found = []
    for leaf, (entry, where) in zip(leaves, entries, strict=True):
        if leaf.entry is AUTO and entry is not AUTO:
            if devices > 1 and axes and not any(isinstance(dim, int) for dim in entry):
                entry = as_layout(entry, axes, layout.order)
            leaf = dataclasses.replace(leaf, entry=entry, where=where, by="file")
        found.append(leaf)
    return found

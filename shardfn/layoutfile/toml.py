"""The TOML text of a layout file, read and written. Size and depth are bounded: a file may come from anybody."""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

from shardfn.errors import Problem, nearest
from shardfn.frontend import other_words
from shardfn.frontend.options import OBJECTIVES, level_of
from shardfn.ir.model import Spec
from shardfn.ir.source_lines import file_line
from shardfn.layoutfile.rehearsal_table import read_rehearsal, rehearsal_lines
from shardfn.layoutfile.toml_text import quoted, wrapped
from shardfn.planning.layout_rules import (
    ELLIPSIS,
    MAX_REPORTED,
    UNSHARDED,
    Constraint,
    DecisionSource,
    LayoutFile,
    LayoutRule,
    RuleDim,
    at_line,
    printable,
)
from shardfn.search.generators import STYLES

FORMAT = "shardfn-layout"
VERSION = 2
"""Raised when a key is renamed, removed or changes its meaning, not when one is added."""
VERSIONS_READ = (1, 2)
OLD_KEYS = {"grid": "mesh", "inside": "constraints"}
"""Keys of version 1 that have another name since."""

MAX_BYTES = 4 * 2**20
MAX_RULES = 20_000
MAX_GLOBS = 1_000
"""The most rules with wildcards in a section: each is matched against every array."""
MAX_CHARACTERS = 400
MAX_STARS = 16
MAX_DEPTH = 8
MAX_SIZE = 2**24
MAX_DIMS = 32
MAX_LINE = 2**15
Problems = list[Problem]


def parse_toml(text: str, name: str, problems: Problems) -> LayoutFile | None:
    """A layout file from its text.

    Args:
      text: TOML.
      name: the file's name, for errors.
      problems: receives everything that is wrong.

    Returns:
      The layout file. Where `problems` has grown, the part of it that can be compared with a model: a faulty rule becomes
      unsharded. None where the fault is not in the rules alone; comparing would then report its consequences as faults.

    >>> parse_toml('format = "shardfn-layout"\\nversion = 2\\n[mesh]\\ndata = "left"\\n[arguments]\\nx = ["data", 1]', "x", [])
    LayoutFile(mesh=(('data', None),), arguments=(LayoutRule(glob='x', sharding=('data', 1), ...
    """
    before = len(problems)
    data = _load(text, name, problems)
    if data is None:
        return None
    version = data.get("version")
    is_ours = data.get("format") == FORMAT and type(version) is int
    if not is_ours or version not in VERSIONS_READ:
        is_newer = is_ours and isinstance(version, int) and version > VERSION
        fix = f'begin it with format = "{FORMAT}" and version = {VERSION}'
        problems.append(Problem(f"{name} is {'a layout file of a newer version' if is_newer else 'not a layout file'}",
                                where=f"format = {_short(data.get('format'))}, version = {_short(version)}",
                                why=f"this release reads format = {FORMAT!r}, version = {VERSION} or older",
                                fix="read it with a newer shardfn" if is_newer else fix))  # fmt: skip
        return None
    reader = _Reader(name, problems, _lines(text))
    known = {**_FIELDS, "format": None, "version": None}
    for key in [key for key in data if key not in known][:MAX_REPORTED]:
        reader.line = reader.lines.get(("", key), 0)
        reader.wrong(f"layout files have no key `{_short(key)}`", _short(key), nearest(_short(key), known),
                     f"the keys are {', '.join(known)}")  # fmt: skip
    layout = reader.layout(data)
    if len(problems) == before:
        reader.check_rules_together(layout)
    if len(problems) == before:
        return layout
    can_be_compared = reader.is_comparable and (layout.mesh or not any(rule.has_axes for rule in _all_rules(layout)))
    left_out = {"constraints": (), "sources": (), "order": None, "level": None, "style": ""}
    return dataclasses.replace(layout, **left_out) if can_be_compared else None


def _all_rules(layout: LayoutFile) -> list[LayoutRule]:
    return [*layout.arguments, *layout.results, *layout.activations, LayoutRule("others", layout.others),
            LayoutRule("batch", layout.batch)]  # fmt: skip


def _load(text: str, name: str, problems: Problems) -> dict[str, Any] | None:
    """The data of a TOML text, under the keys of today."""
    depth = unclosed = opened = 0
    for number, line in enumerate(text.splitlines(), 1):
        bare = re.sub(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'', '""', line) if len(line) <= MAX_LINE else line
        code = bare.partition("#")[0]
        unclosed = max(0, unclosed + code.count("[") + code.count("{") - code.count("]") - code.count("}"))
        opened = (opened or number) if unclosed else 0
        depth = max(depth, unclosed, code.count(".") - 8)
        if len(line) > MAX_LINE or depth > MAX_DEPTH:
            problems.append(Problem(f"{name} is nested too deep, or has too long a line",
                                    where=f"{name}:{number}: {_short(line)}", fix="write one rule per line, with a quoted path",
                                    why=f"at most {MAX_DEPTH} levels and {MAX_LINE:,} characters a line are read"))  # fmt: skip
            return None
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError, TypeError) as error:
        why = str(error) if not isinstance(error, RecursionError) else "it is nested too deep"
        found = re.search(r"at line (\d+)", why)
        line, lines = int(found[1]) if found else len(text.splitlines()), text.splitlines()
        if opened and ("nclosed" in why or opened < line):
            line, why = opened, f"the bracket that opens on line {opened} is not closed: {why}"
        where = f"{at_line(name, line)}: {_short(lines[line - 1])}" if 0 < line <= len(lines) else name
        problems.append(Problem(f"{name} is not valid TOML", where, _short(why, 200),
                                "correct that line, or write the file again: plan.save(path)"))  # fmt: skip
        return None
    return {new if (new := OLD_KEYS.get(key, key)) not in data else key: value for key, value in data.items()}


def _lines(text: str) -> dict[tuple[str, str], int]:
    """The line of each key by its section, "" for the top level, and of each section under the key ""."""
    found: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*(\w+)\s*\]", line):
            section = OLD_KEYS.get(header[1], header[1])
            found.setdefault((section, ""), number)
        elif (key := re.match(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[\w-]+)\s*=""", line)) and len(line) <= MAX_LINE:
            written = key[1]
            try:
                written = tomllib.loads(f"key = {written}")["key"] if written[0] in "\"'" else written
            except tomllib.TOMLDecodeError:
                continue
            found.setdefault((section, written), number)
    return found


def _short(value: Any, most: int = 60) -> str:
    text = repr(value) if not isinstance(value, str) else value
    text = printable(" ".join(text[: 4 * most].split()))
    return text if len(text) <= most else text[: most - 1] + "…"


class _Reader:
    """Reads the values of a file as fields of a `LayoutFile`; `problems` receives what is wrong, with its line.

    `is_comparable` becomes false at a fault that is not of a single rule.
    """

    def __init__(self, name: str, problems: Problems, lines: Mapping[tuple[str, str], int]):
        self.name, self.problems, self.lines, self.line = name, problems, lines, 0
        self.faults, self.is_comparable = 0, True

    def layout(self, data: Mapping[str, Any]) -> LayoutFile:
        fields = {}
        for key, read in _FIELDS.items():
            if key in data:
                self.line = self.lines.get(("", key), self.lines.get((key, ""), 0))
                before = self.faults
                fields[key] = read(self, data[key], key)
                self.is_comparable &= self.faults == before or key not in ("mesh", "others", "batch")
        lines = {section or key: n for (section, key), n in self.lines.items() if not (section and key)}
        return LayoutFile(**fields, name=self.name, lines=lines)

    def wrong(self, what: str, where: str, fix: str, why: str = "") -> None:
        self.faults += 1
        if len(self.problems) < 100:
            self.problems.append(Problem(what, f"{at_line(self.name, self.line)}: {where}", why, fix))

    def text(self, value: Any, where: str) -> str:
        if isinstance(value, str) and len(value) <= 2**14:
            return value
        self.wrong(f"`{where}` must be a string", f"{where} = {_short(value)}", "write it in quotes")
        return ""

    def integer(self, value: Any, where: str, least: int = 0, most: int = MAX_SIZE) -> int:
        if type(value) is int and least <= value <= most:
            return value
        self.wrong(f"`{where}` must be an int from {least} to {most}", f"{where} = {_short(value)}", f"write {least}")
        return least

    def level(self, value: Any, where: str) -> int:
        level = level_of(value)
        if type(level) is int and 0 <= level < len(OBJECTIVES):
            return level
        words = ", ".join(f'"{word}"' for word in OBJECTIVES)
        what, found = f"`{where}` must be one of {words}, or 0, 1, 2", f"{where} = {_short(value)}"
        self.wrong(what, found, other_words.level_fix(value, OBJECTIVES) or f'write {where} = "time"')
        return 0

    def style(self, value: Any, where: str) -> str:
        if isinstance(value, str) and value in STYLES:
            return value
        words = ", ".join(f'"{word}"' for word in STYLES)
        self.wrong(f"`{where}` must be one of {words}", f"{where} = {_short(value)}", nearest(value, STYLES))
        return ""

    def mesh(self, value: Any, where: str) -> tuple[tuple[str, int | None], ...]:
        fix = 'write [mesh] and a line for each axis: data = "left", model = 4'
        if not isinstance(value, dict) or len(value) > MAX_DIMS:
            self.wrong("`mesh` must be a table of axes", f"mesh = {_short(value)}", fix)
            return ()
        found: list[tuple[str, int | None]] = []
        for axis, size in value.items():
            self.line = self.lines.get((where, axis), self.line)
            at = f"mesh.{_short(axis)}"
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", axis) or axis == "None":
                self.wrong(f"{_short(axis)!r} is no name of a mesh axis", at, "use letters, digits and _",
                           "it becomes the name of an axis of a `jax.sharding.Mesh`")  # fmt: skip
            if size != "left" and type(size) is not int:
                self.wrong(f"axis `{_short(axis)}` has no size", f"{at} = {_short(size)}",
                           'write an int, or "left": the size that the device count leaves')  # fmt: skip
            found.append((axis, None if size == "left" else self.integer(size, at, 1) if type(size) is int else 1))
        if sum(size is None for _, size in found) > 1:
            self.wrong("two axes are left to the device count", where, "give all but one of them a size",
                       "one device count determines one size")  # fmt: skip
        return tuple(found)

    def dims(self, value: Any, where: str) -> tuple[RuleDim, ...]:
        """A list of dimensions, or "replicated" ("whole" in version 1)."""
        if value in ("replicated", "whole"):
            return UNSHARDED
        fix = 'write one entry for each dimension: ["data", 1], [["data", "model"], "..."], [4, 1], or "replicated"'
        if not isinstance(value, list) or len(value) > MAX_DIMS:
            self.wrong(f"`{_short(where)}` is no sharding", f"{_short(where)} = {_short(value)}", fix)
            return UNSHARDED
        found: list[RuleDim] = []
        for dim in value:
            if (type(dim) is int and 1 <= dim <= MAX_SIZE) or (isinstance(dim, str) and 0 < len(dim) <= 64):
                found.append(dim)
            elif isinstance(dim, list) and all(
                isinstance(n, str) and 0 < len(n) <= 64 and n != ELLIPSIS for n in dim[:MAX_DIMS]
            ):
                found.append(tuple(dim[:MAX_DIMS]) if len(dim) != 1 else dim[0])
            else:
                what, at = f"`{_short(dim)}` is no entry of a dimension", f"{_short(where)} = {_short(value)}"
                why = 'an entry is a mesh axis, a list of mesh axes, a number of shards (1: unsharded), or "..."'
                self.wrong(what, at, fix, why)
        if found.count(ELLIPSIS) > 1:
            self.wrong('"..." occurs twice', f"{_short(where)} = {_short(value)}", "write it once",
                       "the dimensions that each stands for would be ambiguous")  # fmt: skip
        return tuple(1 if dim == () else dim for dim in found)

    def rule(self, glob: str, value: Any, section: str) -> LayoutRule:
        self.line, at = self.lines.get((section, glob), self.line), f"{section}.{_short(glob)}"
        if len(glob) > MAX_CHARACTERS or glob.count("*") > MAX_STARS or not glob:
            self.wrong("a path is empty, too long or has too many *", at, "write a shorter glob",
                       f"up to {MAX_CHARACTERS} characters and {MAX_STARS} *")  # fmt: skip
            self.is_comparable = False
        if not isinstance(value, dict):
            return LayoutRule(glob, None if value == "open" else self.dims(value, at), line=self.line)
        for key in value:
            if key not in ("sharding", "cut", "dims", "optional", "rows"):  # `cut` until version 1
                self.wrong(f"a rule has no `{_short(key)}`", at, "use sharding, dims, rows and optional")
        names = value.get("dims", [])
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
            self.wrong("`dims` must be a list of different names", f"{at}.dims = {_short(names)}",
                       'write dims = ["out", "in"]')  # fmt: skip
            names = []
        optional = value.get("optional", False)
        if not isinstance(optional, bool):
            self.wrong("`optional` must be true or false", at, "write optional = true")
        rows = value.get("rows", [])
        if not isinstance(rows, list) or not all(type(n) is int and n > 0 for n in rows):
            rows = self.wrong("`rows` must be a list of ints from 1", f"{at}.rows = {_short(rows)}", "rows = [10, 20]")
        sharding = value.get("sharding", value.get("cut"))
        if isinstance(sharding, dict):
            for dim in sharding:
                if dim not in names:
                    self.wrong(f"`{_short(dim)}` is no dim of the rule", at, f"its dims are {_short(names)}")
            sharding = [sharding.get(dim, 1) for dim in names]
        elif sharding is None:
            self.wrong("a rule has no sharding", at, 'write sharding = ["data", 1]')
            sharding = []
        found = None if sharding == "open" else self.dims(sharding, at)
        return LayoutRule(glob, found, tuple(map(str, names)), bool(optional), tuple(rows or ()), self.line)

    def rules(self, value: Any, where: str) -> tuple[LayoutRule, ...]:
        """The rules of a section; a faulty one becomes unsharded."""
        globs = [glob for glob in value if any(c in glob for c in "*?[")] if isinstance(value, dict) else []
        if not isinstance(value, dict):
            self.wrong(f"`{where}` must be a table of rules", f"{where} = {_short(value)}",
                       f'write [{where}] and a line for each rule: "*/w1" = ["data", 1]')  # fmt: skip
        elif len(value) > MAX_RULES or len(globs) > MAX_GLOBS:
            self.wrong(f"[{where}] has {len(value)} rules, {len(globs)} of them with wildcards", where,
                       "use fewer, wider globs",
                       f"up to {MAX_RULES} are read, {MAX_GLOBS} of them with wildcards")  # fmt: skip
        else:
            found = []
            for glob, entry in value.items():
                before = self.faults
                rule = self.rule(glob, entry, where)
                unsharded = dataclasses.replace(rule, sharding=UNSHARDED, dims=(), optional=True)
                found.append(rule if self.faults == before else unsharded)
            return tuple(found)
        self.is_comparable = False
        return ()

    def ranks(self, value: Any, where: str) -> tuple[int, ...]:
        if isinstance(value, list) and all(type(r) is int for r in value) and sorted(value) == list(range(len(value))):
            return tuple(value)
        self.wrong(f"`{where}` must list every device once, counted from 0", f"{where} = {_short(value)}",
                   f"remove it, or write {where} = [1, 0]")  # fmt: skip
        return ()

    def tables(
        self, value: Any, where: str, keys: Mapping[str, tuple[type, ...]], flags: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        if not isinstance(value, list) or len(value) > MAX_RULES:
            self.wrong(f"`{where}` must be a list of tables", f"{where} = {_short(value)}", f"write [[{where}]]")
            return
        for row in value:
            if not isinstance(row, dict) or row.keys() - {*keys, *flags} or not all(
                type(row.get(key)) in types for key, types in (*keys.items(), *((f, (bool, NoneType)) for f in flags))
            ):  # fmt: skip
                self.wrong(f"an entry of [[{where}]] is not complete", _short(row), f"give it {', '.join(keys)}")
            else:
                yield row

    def constraints(self, value: Any, where: str) -> tuple[Constraint, ...]:
        keys = {"op": (str,), "equation": (int, list), "line": (str,), "operands": (list,), "results": (list,)}
        found: list[Constraint] = []
        for row in self.tables(value, where, keys, flags=["shifts"]):
            specs = self.specs(row["operands"], where), self.specs(row["results"], where)
            numbers = row["equation"] if isinstance(row["equation"], list) else [row["equation"]]
            if not all(type(number) is int for number in numbers):
                self.wrong("`equation` must be an int or a list of them", f"{where}: {_short(numbers)}",
                           "write equation = 12, or equation = [12, 40]", "it numbers the constrained ops")  # fmt: skip
            shifts = row.get("shifts", False)
            found += [Constraint(row["op"][:64], number, row["line"], *specs, shifts) for number in numbers]
        return tuple(found)

    def specs(self, values: list[Any], where: str) -> tuple[Spec | None, ...]:
        found: list[Spec | None] = []
        for value in values[:4096]:
            dims = None if value == "open" else self.dims(value, where)
            if any((dim != 1 and not isinstance(dim, str | tuple)) or dim == ELLIPSIS for dim in dims or ()):
                found_text = f"{where}: {_short(value)}"
                self.wrong("a constraint names mesh axes, or 1", found_text, 'write ["data", 1], or "open"')
            found.append(None if dims is None else tuple(
                () if isinstance(dim, int) else (dim,) if isinstance(dim, str) else dim for dim in dims))  # fmt: skip
        return tuple(found)

    def sources(self, value: Any, where: str) -> tuple[DecisionSource, ...]:
        rows = self.tables(value, where, {"by": (str,), "why": (str,), "of": (list,)})
        return tuple(DecisionSource(row["by"], row["why"], tuple(map(str, row["of"]))) for row in rows)

    def check_rules_together(self, layout: LayoutFile) -> None:
        """Report what is wrong with the file as a whole."""
        rules = _all_rules(layout)
        named = next((rule for rule in rules if rule.has_axes), None)
        counted = next((rule for rule in rules if rule.has_counts), None)
        if named and counted:
            self.line = counted.line
            self.wrong(f"`{named.glob}` names mesh axes and `{counted.glob}` gives numbers of shards",
                       f"{_short(named.sharding)} and {_short(counted.sharding)}",
                       "write mesh axes in all rules, or numbers in all", "integers leave the mesh axes open")  # fmt: skip
        if named and not layout.mesh:
            self.line = named.line
            self.wrong("there is no [mesh]", f"{named.glob} = {_short(named.sharding)}",
                       'write [mesh] and a line for each axis: data = "left"', "rules name its axes")  # fmt: skip
        sizes = [size or 0 for _, size in layout.mesh]
        if layout.order is not None and (not layout.order or math.prod(sizes) != len(layout.order)):
            self.line = layout.lines.get("order", 0)
            self.wrong("`order` does not list the devices of the mesh", f"order has {len(layout.order)} entries",
                       "remove it, or give every axis a size", "it gives the device at each mesh position")  # fmt: skip


_FIELDS: dict[str, Callable[[_Reader, Any, str], Any]] = {
    "about": _Reader.text,
    "function": _Reader.text,
    "fingerprint": _Reader.text,
    "device": _Reader.text,
    "level": _Reader.level,
    "style": _Reader.style,
    "others": _Reader.dims,
    "batch": _Reader.dims,
    "order": _Reader.ranks,
    "mesh": _Reader.mesh,
    "arguments": _Reader.rules,
    "results": _Reader.rules,
    "activations": _Reader.rules,
    "constraints": _Reader.constraints,
    "sources": _Reader.sources,
    "rehearsal": lambda reader, value, where: read_rehearsal(value, reader.wrong),
}
"""The keys of a file in their order, and how each is read."""


def to_toml(layout: LayoutFile, notes: Mapping[tuple[str, str], str] | None = None) -> str:
    """The TOML text of a layout file; `parse_toml` reads it back.

    Args:
      layout: the layout file.
      notes: a comment for a rule, by section and glob.

    >>> print(to_toml(LayoutFile(mesh=(("data", None),), arguments=(LayoutRule("*/w", ("data", 1)),))))
    format = "shardfn-layout"
    version = 2
    <BLANKLINE>
    [mesh]
    data = "left"
    <BLANKLINE>
    [arguments]
    "*/w" = ["data", 1]
    """
    lines = [f"format = {quoted(FORMAT)}", f"version = {VERSION}"]
    for key in ("about", "function", "fingerprint", "device"):
        if getattr(layout, key):
            lines.append(f"{key} = {quoted(getattr(layout, key))}")
    if layout.level is not None:
        lines.append(f"level = {quoted(OBJECTIVES[layout.level])}")
    if layout.style:
        lines.append(f"style = {quoted(layout.style)}")
    for key in ("others", "batch"):
        if (sharding := getattr(layout, key)) is not None:
            lines.append(f"{key} = {_sharding(sharding)}")
    if layout.order is not None:
        lines += ["order = [", *wrapped(map(str, layout.order)), "]"]
    if layout.mesh:
        lines += ["", "[mesh]", *(f"{axis} = {size or quoted('left')}" for axis, size in layout.mesh)]
    for section in ("arguments", "results", "activations"):
        if rules := getattr(layout, section):
            lines += ["", f"[{section}]"]
            lines += [_rule(rule, (notes or {}).get((section, rule.glob), "")) for rule in rules]
    equal: dict[tuple[Constraint, str], list[str]] = {}
    for constraint in layout.constraints:
        alike = dataclasses.replace(constraint, number=0), file_line(constraint.where)
        equal.setdefault(alike, []).append(str(constraint.number))
    for (constraint, line), numbers in equal.items():
        which = numbers if len(numbers) == 1 else ["[", *wrapped(numbers), "]"]
        lines += ["", "[[constraints]]", f"op = {quoted(constraint.kind)}", f"equation = {which[0]}", *which[1:],
                  f"line = {quoted(line)}"]  # fmt: skip
        for name, specs in (("operands", constraint.operands), ("results", constraint.results)):
            texts = (quoted("open") if spec is None else _sharding(rule_dims(spec)) for spec in specs)
            lines.append(f"{name} = [{', '.join(texts)}]")
        lines += ["shifts = true"] * constraint.shifts
    for source in layout.sources:
        lines += ["", "[[sources]]", f"by = {quoted(source.by)}", f"why = {quoted(source.why)}",
                  "of = [", *wrapped(map(quoted, source.of)), "]"]  # fmt: skip
    if layout.rehearsal is not None:
        lines += ["", "[rehearsal]", *rehearsal_lines(layout.rehearsal)]
    return "\n".join(lines)


def _rule(rule: LayoutRule, note: str) -> str:
    text = quoted("open") if rule.sharding is None else _sharding(rule.sharding)
    if rule.dims or rule.optional or rule.rows:
        dims = [f"dims = [{', '.join(map(quoted, rule.dims))}]"] if rule.dims else []
        rows = [f"rows = {list(rule.rows)}"] if rule.rows else []
        text = ", ".join([*dims, f"sharding = {text}", *rows, *["optional = true"] * rule.optional])
        text = f"{{ {text} }}"
    note = "".join(c if c.isprintable() else " " for c in note)
    return f"{quoted(rule.glob)} = {text}" + (f"  # {note}" if note else "")


def rule_dims(spec: Iterable[Iterable[str]]) -> tuple[RuleDim, ...]:
    """The entries of a rule for the mesh axes of each dimension.

    >>> rule_dims(((), ("a",), ("a", "b")))
    (1, 'a', ('a', 'b'))
    """
    return tuple(1 if not axes else axes[0] if len(axes) == 1 else axes for axes in map(tuple, spec))


def _sharding(sharding: tuple[RuleDim, ...]) -> str:
    if sharding == UNSHARDED:
        return quoted("replicated")
    dims = (
        str(d) if isinstance(d, int) else quoted(d) if isinstance(d, str) else f"[{', '.join(map(quoted, d))}]"
        for d in sharding
    )
    return f"[{', '.join(dims)}]"

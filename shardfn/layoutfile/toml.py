"""The text of a layout file, TOML, to data and back. No code, no includes; size and depth are bounded."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shardfn.errors import Problem, nearest
from shardfn.ir.model import Spec
from shardfn.planning.decisions import Constraint
from shardfn.planning.layout_rules import MOST, SPREAD, WHOLE, Dim, LayoutFile, Rule, Source, printable

FORMAT = "shardfn-layout"
VERSION = 1
"""It grows when a key goes away or changes its meaning, not when one is added."""

MOST_BYTES = 4 * 2**20
MOST_RULES = 20_000
MOST_GLOBS = 1_000
"""Of the rules, those with wildcards: each is held against every array."""
MOST_CHARACTERS = 400
MOST_STARS = 16
MOST_DEPTH = 8
MOST_SIZE = 2**24
MOST_DIMS = 32

Problems = list[Problem]


def parse(text: str, name: str, problems: Problems) -> LayoutFile | None:
    """A layout file's text as data; None where `problems` has grown.

    >>> parse('format = "shardfn-layout"\\nversion = 1\\n[grid]\\ndata = "left"\\n[arguments]\\nx = ["data", 1]', "x", [])
    LayoutFile(grid=(('data', None),), arguments=(Rule(glob='x', cut=('data', 1), dims=(), optional=False),), ...
    """
    before = len(problems)
    data = _toml(text, name, problems)
    if data is None:
        return None
    version = data.get("version")
    if data.get("format") != FORMAT or type(version) is not int or version != VERSION:
        newer = type(version) is int and version > VERSION and data.get("format") == FORMAT
        problems.append(
            Problem(
                f"{name} is {'a layout file of a newer version' if newer else 'not a layout file'}",
                where=f"format = {_short(data.get('format'))}, version = {_short(version)}",
                why=f"this version reads format = {FORMAT!r}, version = {VERSION}",
                fix="read it with a newer shardfn"
                if newer
                else f'begin it with format = "{FORMAT}" and version = {VERSION}',
            )
        )
        return None
    reader = _Reader(name, problems)
    known = {**_FIELDS, "format": None, "version": None}
    for key in [key for key in data if key not in known][:MOST]:
        problems.append(
            Problem(f"{name} has a key `{_short(key)}`, which layout files do not have", where=name,
                    why=f"the keys are {', '.join(known)}", fix=nearest(_short(key), known))
        )  # fmt: skip
    fields = {key: read(reader, data[key], key) for key, read in _FIELDS.items() if key in data}
    if len(problems) > before:
        return None
    layout = LayoutFile(**fields, name=name)
    reader.as_one(layout)
    return None if len(problems) > before else layout


def sound_part(text: str, name: str) -> LayoutFile | None:
    """What can be held against a model of a file that `parse` refuses: faulty rules leave whole what they meet.

    None where the fault is not in rules alone, so that what follows from it would be told as faults of its own.

    >>> head = 'format = "shardfn-layout"\\nversion = 1\\n[grid]\\ndata = 8\\n[arguments]\\n'
    >>> sound_part(head + 'x = [1.5]\\ny = ["data"]', "x").arguments[0]
    Rule(glob='x', cut=('...',), dims=(), optional=True)
    """
    problems: Problems = []
    data = _toml(text, name, problems)
    if data is None or data.get("format") != FORMAT or data.get("version") != VERSION:
        return None
    reader, fields = _Reader(name, problems), {}
    for key in ("grid", "others", "batch"):
        if key in data:
            fields[key] = _FIELDS[key](reader, data[key], key)
    if problems:
        return None
    for key in ("arguments", "results", "activations"):
        written = data.get(key, {})
        if not isinstance(written, dict) or (written and not reader.rules(written, key)):
            return None
        if any(not 0 < len(glob) <= MOST_CHARACTERS or glob.count("*") > MOST_STARS for glob in written):
            return None
        rules = []
        for glob, value in written.items():
            faults: Problems = []
            rule = _Reader(name, faults).rule(glob, value, key)
            rules.append(Rule(glob, WHOLE, optional=True) if faults else rule)
        fields[key] = tuple(rules)
    layout = LayoutFile(**fields, name=name)
    rules = (*layout.arguments, *layout.results, *layout.activations, Rule("", layout.others), Rule("", layout.batch))
    return layout if layout.grid or not any(rule.has_axes for rule in rules) else None


def _toml(text: str, name: str, problems: Problems) -> dict[str, Any] | None:
    depth = open_ = 0
    for line in text.splitlines():
        bare = re.sub(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'', '""', line) if len(line) <= 2**15 else line
        code = bare.partition("#")[0]
        open_ = max(0, open_ + code.count("[") + code.count("{") - code.count("]") - code.count("}"))
        depth = max(depth, open_, code.count(".") - 8)
        if len(line) > 2**15 or depth > MOST_DEPTH:
            problems.append(
                Problem(f"{name} is nested too deep, or has too long a line", where=_short(line),
                        why=f"a layout file needs no more than {MOST_DEPTH} levels and {2**15:,} characters a line",
                        fix="write a rule a line, with a quoted path")
            )  # fmt: skip
            return None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError, TypeError) as error:
        why = str(error) if not isinstance(error, RecursionError) else "it is nested too deep"
        problems.append(
            Problem(f"{name} is no TOML", where=name, why=_short(why, 200),
                    fix="mend the line that is named, or write it anew: plan.save(path)")
        )  # fmt: skip
        return None


def _short(value: Any, most: int = 60) -> str:
    text = repr(value) if not isinstance(value, str) else value
    text = printable(" ".join(text[: 4 * most].split()))
    return text if len(text) <= most else text[: most - 1] + "…"


class _Reader:
    """Values of a file as fields of a `LayoutFile`; what is wrong goes to `problems`."""

    def __init__(self, name: str, problems: Problems):
        self.name, self.problems = name, problems

    def wrong(self, what: str, where: str, fix: str, why: str = "") -> None:
        if len(self.problems) < 100:
            self.problems.append(Problem(f"{self.name}: {what}", where, why, fix))

    def text(self, value: Any, where: str) -> str:
        if isinstance(value, str) and len(value) <= 2**14:
            return value
        self.wrong(f"`{where}` must be a string", f"{where} = {_short(value)}", "write it in quotes")
        return ""

    def whole_number(self, value: Any, where: str, least: int = 0, most: int = MOST_SIZE) -> int:
        if type(value) is int and least <= value <= most:
            return value
        self.wrong(f"`{where}` must be an int from {least} to {most}", f"{where} = {_short(value)}", f"write {least}")
        return least

    def level(self, value: Any, where: str) -> int:
        return self.whole_number(value, where, 0, 2)

    def grid(self, value: Any, where: str) -> tuple[tuple[str, int | None], ...]:
        fix = 'write [grid] and a line for each axis: data = "left", model = 4'
        if not isinstance(value, dict) or len(value) > MOST_DIMS:
            self.wrong("`grid` must be a table of axes", f"grid = {_short(value)}", fix)
            return ()
        found: list[tuple[str, int | None]] = []
        for axis, size in value.items():
            at = f"grid.{_short(axis)}"
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", axis) or axis == "None":
                self.wrong(
                    f"{_short(axis)!r} is no name of an axis", at, "use letters, digits and _", "JAX names axes so"
                )
            if size != "left" and type(size) is not int:
                self.wrong(f"axis `{_short(axis)}` has no size", f"{at} = {_short(size)}",
                           'write an int, or "left": what is left of the devices')  # fmt: skip
            found.append((axis, None if size == "left" else self.whole_number(size, at, 1) if type(size) is int else 1))
        if sum(size is None for _, size in found) > 1:
            self.wrong("two axes are left to the device count", where, "give all but one of them a size",
                       "how the devices are shared between them is not said")  # fmt: skip
        return tuple(found)

    def dims(self, value: Any, where: str) -> tuple[Dim, ...]:
        """A list of dims, or "whole"."""
        if value == "whole":
            return WHOLE
        fix = 'write one entry for each dimension: ["data", 1], [["data", "model"], "..."], [4, 1], or "whole"'
        if not isinstance(value, list) or len(value) > MOST_DIMS:
            self.wrong(f"`{_short(where)}` is no layout", f"{_short(where)} = {_short(value)}", fix)
            return WHOLE
        found: list[Dim] = []
        for dim in value:
            if (type(dim) is int and 1 <= dim <= MOST_SIZE) or (isinstance(dim, str) and 0 < len(dim) <= 64):
                found.append(dim)
            elif isinstance(dim, list) and all(
                isinstance(n, str) and 0 < len(n) <= 64 and n != SPREAD for n in dim[:MOST_DIMS]
            ):
                found.append(tuple(dim[:MOST_DIMS]) if len(dim) != 1 else dim[0])
            else:
                why = 'a dim is an axis, a list of axes, a number of pieces (1: whole), or "..."'
                self.wrong(f"`{_short(dim)}` is no cut of a dimension", f"{_short(where)} = {_short(value)}", fix, why)
        if found.count(SPREAD) > 1:
            self.wrong('"..." stands twice', f"{_short(where)} = {_short(value)}", "write it once",
                       "how the dimensions are shared between them is not said")  # fmt: skip
        return tuple(1 if dim == () else dim for dim in found)

    def rule(self, glob: str, value: Any, where: str) -> Rule:
        at = f"{where}.{_short(glob)}"
        if len(glob) > MOST_CHARACTERS or glob.count("*") > MOST_STARS or not glob:
            self.wrong("a path is empty, too long or has too many *", at, "write a shorter glob",
                       f"up to {MOST_CHARACTERS} characters and {MOST_STARS} *")  # fmt: skip
        if not isinstance(value, dict):
            return Rule(glob, None if value == "open" else self.dims(value, at))
        for key in value:
            if key not in ("cut", "dims", "optional"):
                self.wrong(f"a rule has no `{_short(key)}`", at, "use cut, dims and optional")
        names = value.get("dims", [])
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
            self.wrong(
                "`dims` must be a list of names, each once",
                f"{at}.dims = {_short(names)}",
                'write dims = ["out", "in"]',
            )
            names = []
        optional = value.get("optional", False)
        if not isinstance(optional, bool):
            self.wrong("`optional` must be true or false", at, "write optional = true")
        cut = value.get("cut")
        if isinstance(cut, dict):
            for dim in cut:
                if dim not in names:
                    self.wrong(f"`{_short(dim)}` is no dim of the rule", f"{at}.cut", f"its dims are {_short(names)}")
            cut = [cut.get(dim, 1) for dim in names]
        elif cut is None:
            self.wrong("a rule says nothing", at, 'write cut = ["data", 1]', "without a cut it lies nothing out")
            cut = []
        found = None if cut == "open" else self.dims(cut, at)
        return Rule(glob, found, tuple(map(str, names)), bool(optional))

    def rules(self, value: Any, where: str) -> tuple[Rule, ...]:
        if not isinstance(value, dict):
            self.wrong(f"`{where}` must be a table of rules", f"{where} = {_short(value)}",
                       f'write [{where}] and a line for each rule: "*/w1" = ["data", 1]')  # fmt: skip
            return ()
        globs = sum(any(c in glob for c in "*?[") for glob in value)
        if len(value) > MOST_RULES or globs > MOST_GLOBS:
            self.wrong(f"[{where}] has {len(value)} rules, {globs} of them with wildcards", where, "use fewer, wider globs",
                       f"up to {MOST_RULES} are read, {MOST_GLOBS} of them with wildcards")  # fmt: skip
            return ()
        return tuple(self.rule(glob, entry, where) for glob, entry in value.items())

    def ranks(self, value: Any, where: str) -> tuple[int, ...]:
        if isinstance(value, list) and all(type(r) is int for r in value) and sorted(value) == list(range(len(value))):
            return tuple(value)
        self.wrong(f"`{where}` must list every device once, counted from 0", f"{where} = {_short(value)}",
                   f"leave it out, or write {where} = [1, 0]")  # fmt: skip
        return ()

    def tables(self, value: Any, where: str, keys: Mapping[str, tuple[type, ...]]) -> Iterator[dict[str, Any]]:
        if not isinstance(value, list) or len(value) > MOST_RULES:
            self.wrong(f"`{where}` must be a list of tables", f"{where} = {_short(value)}", f"write [[{where}]]")
            return
        for row in value:
            if (
                not isinstance(row, dict)
                or set(row) - set(keys)
                or not all(type(row.get(key)) in types for key, types in keys.items())
            ):
                self.wrong(f"an entry of [[{where}]] is not complete", _short(row), f"give it {', '.join(keys)}")
            else:
                yield row

    def inside(self, value: Any, where: str) -> tuple[Constraint, ...]:
        keys = {"op": (str,), "equation": (int, list), "line": (str,), "operands": (list,), "results": (list,)}
        found: list[Constraint] = []
        for row in self.tables(value, where, keys):
            ends = self.ends(row["operands"], where), self.ends(row["results"], where)
            numbers = row["equation"] if isinstance(row["equation"], list) else [row["equation"]]
            if not all(type(number) is int for number in numbers):
                self.wrong("`equation` must be an int or a list of them", f"{where}: {_short(numbers)}",
                           "write equation = 12, or equation = [12, 40]", "it says which ops are held so")  # fmt: skip
            found += [Constraint(row["op"][:64], number, row["line"], *ends) for number in numbers]
        return tuple(found)

    def ends(self, values: list[Any], where: str) -> tuple[Spec | None, ...]:
        found: list[Spec | None] = []
        for value in values[:4096]:
            if value == "open":
                found.append(None)
                continue
            dims = self.dims(value, where)
            if any((dim != 1 and not isinstance(dim, str | tuple)) or dim == SPREAD for dim in dims):
                self.wrong(
                    "what is held inside names axes, or 1", f"{where}: {_short(value)}", 'write ["data", 1], or "open"'
                )
            found.append(tuple(() if isinstance(dim, int) else (dim,) if isinstance(dim, str) else dim for dim in dims))
        return tuple(found)

    def sources(self, value: Any, where: str) -> tuple[Source, ...]:
        keys = {"by": (str,), "why": (str,), "of": (list,)}
        return tuple(
            Source(row["by"], row["why"], tuple(map(str, row["of"]))) for row in self.tables(value, where, keys)
        )

    def as_one(self, layout: LayoutFile) -> None:
        """What is wrong with the file as a whole."""
        rules = [*layout.arguments, *layout.results, *layout.activations, Rule("others", layout.others),
                 Rule("batch", layout.batch)]  # fmt: skip
        axes = [rule for rule in rules if rule.has_axes]
        pieces = [r for r in rules if any(isinstance(dim, int) and dim > 1 for dim in r.cut or ())]
        if axes and pieces:
            self.wrong(f"`{axes[0].glob}` names axes and `{pieces[0].glob}` counts pieces",
                       f"{_short(axes[0].cut)} and {_short(pieces[0].cut)}", "write axes in all rules, or numbers in all",
                       "numbers leave the choice of axes open, and the named ones are already chosen")  # fmt: skip
        if axes and not layout.grid:
            self.wrong("there is no [grid]", f"{axes[0].glob} = {_short(axes[0].cut)}",
                       'write [grid] and a line for each axis: data = "left"', "rules name its axes")  # fmt: skip
        if layout.order is not None and (
            (n := len(layout.order)) == 0 or any(s is None for _, s in layout.grid) or n != _product(layout.grid)
        ):
            self.wrong("`order` does not list the devices of the grid", f"order has {len(layout.order)} entries",
                       "leave it out, or give every axis a size",
                       "it says which device stands where on a whole grid")  # fmt: skip


def _product(grid: Iterable[tuple[str, int | None]]) -> int:
    total = 1
    for _, size in grid:
        total *= size or 1
    return total


_FIELDS: dict[str, Callable[[_Reader, Any, str], Any]] = {
    "about": _Reader.text,
    "function": _Reader.text,
    "device": _Reader.text,
    "level": _Reader.level,
    "others": _Reader.dims,
    "batch": _Reader.dims,
    "order": _Reader.ranks,
    "grid": _Reader.grid,
    "arguments": _Reader.rules,
    "results": _Reader.rules,
    "activations": _Reader.rules,
    "inside": _Reader.inside,
    "sources": _Reader.sources,
}
"""The keys of a file in their order, and how each is read."""


# ---- writing


def text_of(layout: LayoutFile, notes: Mapping[tuple[str, str], str] | None = None) -> str:
    """The text of a layout file; `parse` gives the same data again.

    Args:
      notes: a comment for a rule, by section and glob.

    >>> print(text_of(LayoutFile(grid=(("data", None),), arguments=(Rule("*/w", ("data", 1)),))))
    format = "shardfn-layout"
    version = 1
    <BLANKLINE>
    [grid]
    data = "left"
    <BLANKLINE>
    [arguments]
    "*/w" = ["data", 1]
    """
    lines = [f"format = {_quoted(FORMAT)}", f"version = {VERSION}"]
    for key in ("about", "function", "device"):
        if getattr(layout, key):
            lines.append(f"{key} = {_quoted(getattr(layout, key))}")
    if layout.level is not None:
        lines.append(f"level = {layout.level}")
    for key in ("others", "batch"):
        if (cut := getattr(layout, key)) is not None:
            lines.append(f"{key} = {_cut(cut)}")
    if layout.order is not None:
        lines += ["order = [", *_wrapped(map(str, layout.order)), "]"]
    if layout.grid:
        lines += ["", "[grid]", *(f"{axis} = {size or _quoted('left')}" for axis, size in layout.grid)]
    for section in ("arguments", "results", "activations"):
        if rules := getattr(layout, section):
            lines += ["", f"[{section}]"]
            lines += [_rule(rule, (notes or {}).get((section, rule.glob), "")) for rule in rules]
    alike: dict[Constraint, list[str]] = {}
    for held in layout.inside:
        alike.setdefault(dataclasses.replace(held, number=0), []).append(str(held.number))
    for held, numbers in alike.items():
        ends = {name: ", ".join(_quoted("open") if s is None else _cut(_dims(s)) for s in specs)
                for name, specs in (("operands", held.operands), ("results", held.results))}  # fmt: skip
        which = numbers if len(numbers) == 1 else ["[", *_wrapped(numbers), "]"]
        lines += ["", "[[inside]]", f"op = {_quoted(held.kind)}", f"equation = {which[0]}", *which[1:],
                  f"line = {_quoted(held.where)}",
                  *(f"{name} = [{end}]" for name, end in ends.items())]  # fmt: skip
    for source in layout.sources:
        lines += ["", "[[sources]]", f"by = {_quoted(source.by)}", f"why = {_quoted(source.why)}",
                  "of = [", *_wrapped(map(_quoted, source.of)), "]"]  # fmt: skip
    return "\n".join(lines)


def _rule(rule: Rule, note: str) -> str:
    cut = _quoted("open") if rule.cut is None else _cut(rule.cut)
    if rule.dims or rule.optional:
        parts = [f"cut = {cut}"]
        if rule.dims:
            parts.insert(0, f"dims = [{', '.join(map(_quoted, rule.dims))}]")
        if rule.optional:
            parts.append("optional = true")
        cut = f"{{ {', '.join(parts)} }}"
    note = "".join(c if c.isprintable() else " " for c in note)
    return f"{_quoted(rule.glob)} = {cut}" + (f"  # {note}" if note else "")


def _dims(spec: Spec) -> tuple[Dim, ...]:
    return tuple(1 if not dim else dim[0] if len(dim) == 1 else dim for dim in spec)


def _cut(cut: tuple[Dim, ...]) -> str:
    if cut == WHOLE:
        return _quoted("whole")
    dims = (
        str(d) if isinstance(d, int) else _quoted(d) if isinstance(d, str) else f"[{', '.join(map(_quoted, d))}]"
        for d in cut
    )
    return f"[{', '.join(dims)}]"


def _wrapped(words: Iterable[str], width: int = 110) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line) + len(word) > width:
            yield line
            line = ""
        line += f"  {word}," if not line else f" {word},"
    if line:
        yield line


def _quoted(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _code(c)) for c in text) + '"'


def _code(c: str) -> str:
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

"""Fill the tables of RESULTS.md from the files in benchmarks/results, and run the benchmarks that write these files.

A table stands between two comments. The first one names a file, one of its tables and, if not all, its columns:

    <!-- plan_time: plans | program, ops, CPU s -->
    <!-- end -->

The texts around the tables are written by hand.
Run: python benchmarks/results.py [--check] [--run [NAME ...]]
"""

from __future__ import annotations

import argparse
import difflib
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import harness

PAGE = harness.ROOT / "benchmarks" / "RESULTS.md"
FOLDER = harness.ROOT / "benchmarks" / "results"
COMMANDS: dict[str, tuple[str, ...]] = {
    "checkpoint": ("--mib", "128"),
    "data": (),
    "dispatch": ("--rounds", "21"),
    "embedding": (),
    "experts": (),
    "first_call": (),
    "fusion": (),
    "kinds": (),
    "pipeline": (),
    "plan_time": ("--only", "12 layers unrolled", "24 layers scanned", "with gradients", "explain", "Llama"),
    "reuse": ("--layers", "6", "24"),
    "speedup": (),
    "stencils": (),
    "train": (),
    "truth": (),
}
"""What one machine with two cores runs in some minutes each: a benchmark and its arguments. `make peers` runs peers.py."""
_BLOCK = re.compile(r"(?ms)^<!-- (\w+): ([^|\n]+?)(?: \| ([^\n]*?))? -->\n.*?^<!-- end -->$")


def read(folder: pathlib.Path = FOLDER) -> dict[str, dict[str, Any]]:
    """The files that benchmarks wrote, by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> Iterator[str]:
    """Rows as Markdown; numbers stand at the right.

    >>> print("\\n".join(table([{"step": "mlp", "ms": 12.345}])))
    | step | ms |
    |---|---:|
    | mlp | 12.3 |
    """
    names = list(columns) or list(rows[0])
    right = [all(harness.is_number(row[name]) for row in rows) for name in names]
    yield f"| {' | '.join(names)} |"
    yield f"|{'|'.join('---:' if r else '---' for r in right)}|"
    for row in rows:
        yield f"| {' | '.join(harness.text(row[name]) for name in names)} |"


def origin(found: Mapping[str, Any]) -> str:
    """How, when, with what and where a file was made."""
    versions, machine = dict(found["versions"]), found["machine"]
    python, jax = versions.pop("python"), versions.pop("jax")
    others = [f"{name} {version}" for name, version in versions.items() if name not in ("jaxlib", "shardfn")]
    made = [f"`{found['command']}`", found["date"], ", ".join([f"JAX {jax}", f"Python {python}", *others])]
    cores = f"{machine['cores']} core{'s' * (machine['cores'] > 1)}, load {machine['load']} at the start"
    return "; ".join([*made, f"{machine['processor']}, {cores}; on {machine['device']}."])


def filled(page: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the tables of these files.

    Raises:
      KeyError: a comment names a file, a table or a column that is not there.
    """

    def block(match: re.Match[str]) -> str:
        name, which, columns = match.groups()
        found = files[name]
        chosen = [column.strip() for column in columns.split(",")] if columns else []
        notes = [note + ("" if note.endswith(".") else ".") for note in found["notes"]]
        shown = [*table(found["tables"][which], chosen), "", " ".join([origin(found), *notes])]
        return "\n".join([match[0].splitlines()[0], *shown, "<!-- end -->"])

    return _BLOCK.sub(block, page)


def shown(page: str, files: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The files with no other tables than those that the page shows."""
    asked = {(match[1], match[2]) for match in _BLOCK.finditer(page)}
    return {
        name: {**found, "tables": {which: rows for which, rows in found["tables"].items() if (name, which) in asked}}
        for name, found in files.items()
    }


def run(names: Sequence[str]) -> list[str]:
    """Run benchmarks one after the other, each of which writes its file; those that ended with an error or missed a target."""
    FOLDER.mkdir(exist_ok=True)
    failed = []
    for name in names or COMMANDS:
        script = harness.ROOT / "benchmarks" / f"{name}.py"
        command = [sys.executable, str(script), *COMMANDS[name], "--json", str(FOLDER / f"{name}.json")]
        print(f"== {name} {' '.join(COMMANDS[name])}", flush=True)
        if subprocess.run(command, check=False, cwd=harness.ROOT).returncode:
            failed.append(name)
    return failed


def main() -> int:
    """Fill the page, or say where it differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if the page differs from the files"
    )
    parser.add_argument("--run", nargs="*", choices=tuple(COMMANDS), metavar="NAME",
                        help=f"run these first, or all: {', '.join(COMMANDS)}")  # fmt: skip
    options = parser.parse_args()
    failed = [] if options.run is None else run(options.run)
    before, files = PAGE.read_text(encoding="utf-8"), read()
    after = filled(before, files)
    if options.check:
        print(
            "\n".join(
                difflib.unified_diff(before.splitlines(), after.splitlines(), "RESULTS.md", "files", "", "", 0, "")
            )
        )
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    for name, found in shown(before, files).items():
        if found != files[name]:
            harness.write(FOLDER / f"{name}.json", found)
    if failed:
        print(f"an error or a missed target: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

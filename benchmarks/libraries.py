"""How long does a plan take beside JAX's trace and XLA's compile, for functions of other people's libraries?

The functions are those of `tests/ecosystem`, unsharded and as planned for 8 devices. Seconds are those of the processor, all
threads together. With --promises each function is planned for every objective and compiled, and counted are the functions for
which another objective's plan holds at least 1 % less memory, as compiled, than the plan for memory. Needs the libraries: `make
ecosystem` makes the environment; those missing are left out.
Run: python benchmarks/libraries.py [--only haiku optax] [--level memory] [--promises] [--platform cpu] [--json OUT]
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import shardfn
from benchmarks import harness
from shardfn.compiled.executable import read

DEVICES = 8
OBJECTIVES = ("communication", "memory", "time")
WORSE = 1.01


def functions(only: Sequence[str]) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Library, name and maker of each function whose library is installed."""
    tests = types.ModuleType("tests")  # some libraries install a package of this name
    tests.__path__ = [str(harness.ROOT / "tests")]
    sys.modules["tests"] = tests
    for path in sorted((harness.ROOT / "tests" / "ecosystem").glob("test_*.py")):
        library = path.stem.removeprefix("test_")
        if only and library not in only:
            continue
        try:
            module = importlib.import_module(f"tests.ecosystem.{path.stem}")
        except ImportError as error:
            print(f"{library} is left out: {error}")
            continue
        yield from ((library, name, make) for name, make in module.ROWS.items())


def seconds(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the seconds of the processor that it took."""
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def measure(library: str, name: str, make: Callable[[], Any], level: str) -> dict[str, Any]:
    """Ops, and the seconds of the unsharded function's trace and compile and of the plan."""
    row = make()
    leaves, treedef = jax.tree.flatten(row.args)
    arrays = [at for at, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def of_arrays(*given: Any) -> Any:
        full = list(leaves)
        for at, leaf in zip(arrays, given, strict=True):
            full[at] = leaf
        return row.fn(*jax.tree.unflatten(treedef, full))

    _, compiling = seconds(lambda: jax.jit(of_arrays).lower(*(leaves[at] for at in arrays)).compile())
    plan, planning = seconds(lambda: shardfn.plan(row.fn, *row.args, level=level))
    return {
        "library": library, "function": name, "ops": len(plan.partitioned.graph.ops), "trace and compile s": compiling,
        "plan s": planning, "ratio": planning / compiling,
    }  # fmt: skip


def promises(library: str, name: str, make: Callable[[], Any]) -> dict[str, Any]:
    """Peak memory as compiled, of the plan for each objective."""
    row = make()
    peaks = dict[str, int]()
    for level in OBJECTIVES:
        function: Any = shardfn.shard(row.fn, level=level)
        peaks[level] = read(function.lower(*row.args).compile()).together("cpu") or 0
    return {
        "library": library, "function": name,
        **{f"peak, {level}": peak for level, peak in peaks.items()},
        "holds less elsewhere": min(peaks.values()) * WORSE < peaks["memory"],
    }  # fmt: skip


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Functions by size, and all of them."""
    sizes = {
        "up to 50 ops": (-1, 50),
        "to 200": (50, 200),
        "to 1,000": (200, 1000),
        "more": (1000, math.inf),
        "all": (-1, math.inf),
    }
    found = []
    for title, (above, most) in sizes.items():
        some = [row for row in rows if above < row["ops"] <= most]
        if some:
            plans, compiles, ratios = ([row[key] for row in some] for key in ("plan s", "trace and compile s", "ratio"))
            found.append({
                "functions": title, "count": len(some), "plan s, median": statistics.median(plans),
                "90 %": float(np.quantile(plans, 0.9)), "trace and compile s, median": statistics.median(compiles),
                "ratio, median": statistics.median(ratios), "ratio, 90 %": float(np.quantile(ratios, 0.9)),
            })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="libraries")
    parser.add_argument("--level", default="memory", choices=OBJECTIVES)
    parser.add_argument("--promises", action="store_true", help="compile the plan for each objective too")
    options = harness.parse(parser, devices=DEVICES)
    rows, kept = [], []
    for library, name, make in functions(options.only):
        try:
            rows.append(measure(library, name, make, options.level))
            harness.show(rows[-1:])
            if options.promises:
                kept.append(promises(library, name, make))
        except Exception as error:  # a library that does not work with this JAX
            print(f"{library}, {name}: {type(error).__name__}: {str(error)[:200]}")
    tables = {"summary": summary(rows), "functions": rows}
    if kept:
        tables["promises"] = kept
        broken = [row["peak, memory"] / min(row["peak, communication"], row["peak, time"])
                  for row in kept if row["holds less elsewhere"]]  # fmt: skip
        tables["broken promises"] = [
            {"functions": len(kept), "holds less elsewhere": len(broken), "median": statistics.median(broken or [1.0]),
             "most": max(broken, default=1.0)}
        ]  # fmt: skip
        harness.show(tables["broken promises"])
    harness.show(tables["summary"])
    harness.save(options.json, tables)


if __name__ == "__main__":
    main()

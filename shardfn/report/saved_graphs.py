"""The strategy of every op, and a report's data, as files: what the context's `save_graphs` writes."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re

from shardfn.errors import ContextError, fail
from shardfn.ir.model import mesh_text
from shardfn.planning.plan import Plan
from shardfn.report.report import make_report


def save_graphs(plan: Plan, path: str = ".") -> tuple[pathlib.Path, pathlib.Path]:
    """Write `<function>_<n>_strategies.txt` and `<function>_<n>_report.json` into a directory, which is made if needed.

    `n` is the first number that no earlier file has: nothing is overwritten.

    Raises:
      ContextError: the directory cannot be written to.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", plan.function).strip("._")[:80] or "function"
    strategies, report = strategies_text(plan), make_report(plan).to_json()
    directory = pathlib.Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for n in itertools.count():
            first, second = (directory / f"{name}_{n}_{end}" for end in ("strategies.txt", "report.json"))
            # "x" claims the number: another process that writes here at this moment takes the next one.
            if not second.exists():
                with contextlib.suppress(FileExistsError), first.open("x", encoding="utf-8") as file:
                    file.write(strategies + "\n")
                    second.write_text(report + "\n", encoding="utf-8")
                    return first, second
    except OSError as error:
        fail(ContextError, f"the graphs of `{plan.function}` cannot be saved", where=f"save_graphs_path = {str(path)!r}",
             why=str(error), fix="give a directory that can be written to")  # fmt: skip
    raise AssertionError("the numbers never end")


def strategies_text(plan: Plan) -> str:
    """Every op with its strategy, one a line, in program order, as in MindSpore's `step_parallel_end.ir`."""
    partitioned, values = plan.partitioned, plan.partitioned.graph.values

    lines = [f"# {plan.function} on {plan.hardware.name}, mesh {mesh_text(plan.axes)}"]
    lines += [f"%{i} = argument {d.path}: {d.dtype}{list(d.shape)}, strategy: {d.strategy}"
              for i, d in zip(partitioned.graph.arguments(len(plan.inputs)), plan.inputs, strict=True)]  # fmt: skip
    for op in partitioned.graph.ops:
        ends = [tuple(map(partitioned.shards, side)) for side in (op.inputs, op.outputs)]
        lines.append(
            f"{', '.join(f'%{o}' for o in op.outputs)} = {op.name}({', '.join(f'%{i}' for i in op.inputs)})"
            f"  in_strategy: {ends[0]}, out_strategy: {ends[1]}"
            f" : ({', '.join(str(values[i]) for i in op.inputs)}) -> ({', '.join(str(values[i]) for i in op.outputs)})"
            + (f", {op.trips} times" if op.trips > 1 else "") + (f"  # {op.where}" if op.where else "")
        )  # fmt: skip
    return "\n".join(lines)

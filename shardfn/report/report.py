"""A plan as a report: made once, shown as text, in a terminal, as HTML or as JSON, and saved beside its ops."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any

from shardfn.compiled.comparison import Comparison, compare
from shardfn.compiled.executable import Compiled, read
from shardfn.errors import ContextError, fail
from shardfn.ir.model import Collective
from shardfn.planning.plan import Decision, Plan, diff, op_strategies
from shardfn.planning.what_if import with_runners_up
from shardfn.render.html import to_html
from shardfn.render.parts import Part, Table
from shardfn.render.text import Shown, to_text
from shardfn.report.sections import SECTIONS, grid_text, owners, seconds, strides

SCHEMA = 1
"""Version of `Report.to_dict`; it grows when a key goes away or changes its meaning, not when one is added."""


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What a plan does and why. `print` it, show it in a notebook, or take its data with `to_dict` or `to_json`.

    >>> import jax, shardfn
    >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
    >>> report = shardfn.explain(lambda x, w: x @ w, x, w, in_strategy=((4, 1), (1, 2)), device="tpu-v5e:2x4")
    >>> report.to_dict()["outputs"][0]["strategy"]
    [4, 2]
    """

    title: str
    parts: tuple[Part, ...]
    json: str

    def __str__(self) -> str:
        return self.to_text(max(40, min(160, shutil.get_terminal_size((100, 24)).columns)))

    __repr__ = __str__

    def __rich__(self) -> Any:
        return Shown(self.parts)

    def _repr_html_(self) -> str:
        return to_html(self.parts, self.title)

    def to_text(self, width: int = 100) -> str:
        """Plain text, `width` characters wide."""
        return to_text(self.parts, width)

    def to_html(self) -> str:
        """A whole HTML page that needs no other file."""
        return to_html(self.parts, self.title, page=True)

    def to_dict(self) -> dict[str, Any]:
        """Everything in the report as dicts, lists, strings and numbers, nothing left out; `schema` is its version."""
        return json.loads(self.json)

    def to_json(self) -> str:
        """What `to_dict` returns, as JSON text."""
        return self.json


def make_report(plan: Plan, executable: Any = None, arrivals: Sequence[str] = ()) -> Report:
    """The report of a plan.

    Args:
      plan: the plan.
      executable: what `jax.stages.Lowered.compile()` returned for it: adds what XLA made of the prediction.
      arrivals: what is said about arguments that lie elsewhere when they arrive.
    """
    plan = with_runners_up(plan)
    found = None if executable is None else read(executable)
    compared = None if found is None else compare(plan, found)
    data = _data(plan, arrivals)
    if found is not None and compared is not None:
        data["compiled"] = _compared(found, compared)
    parts = (part for make in SECTIONS for part in make(plan, arrivals, compared))
    return Report(f"Plan of {plan.function}", tuple(parts), json.dumps(data, ensure_ascii=False))


def diff_report(first: Plan, second: Plan) -> Report:
    """What differs between two plans of one function, shown as a report is.

    Raises:
      StrategyError: the plans are of functions with other arguments.
    """
    changes = diff(first, second)
    rows = tuple((c.title, c.first, c.second) for c in changes)
    title = f"Plans of {first.function} that differ in {len(rows)} things" if rows else "Two equal plans"
    data = {"schema": SCHEMA, "function": first.function, "changes": [dataclasses.asdict(c) for c in changes]}
    return Report(title, (Table(title, ("what", "first", "second"), rows),), json.dumps(data, ensure_ascii=False))


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
        fail(
            ContextError,
            f"the graphs of `{plan.function}` cannot be saved",
            where=f"save_graphs_path = {str(path)!r}",
            why=str(error),
            fix="give a directory that can be written to",
        )
    raise AssertionError("the numbers never end")


def strategies_text(plan: Plan) -> str:
    """Every op with its cuts, one a line, in program order: what MindSpore's `step_parallel_end.ir` shows."""
    partitioned, values = plan.partitioned, plan.partitioned.graph.values

    def kind(i: int) -> str:
        return str(values[i])

    lines = [f"# {plan.function} on {plan.hardware.name}, grid {grid_text(plan)}"]
    lines += [f"%{i} = argument {d.path}: {d.dtype}{list(d.shape)}, strategy: {d.strategy}"
              for i, d in zip(partitioned.graph.arguments(len(plan.inputs)), plan.inputs, strict=True)]  # fmt: skip
    for op in partitioned.graph.ops:
        ends = [tuple(map(partitioned.shards, side)) for side in (op.inputs, op.outputs)]
        lines.append(
            f"{', '.join(f'%{o}' for o in op.outputs)} = {op.name}({', '.join(f'%{i}' for i in op.inputs)})"
            f"  in_strategy: {ends[0]}, out_strategy: {ends[1]}"
            f" : ({', '.join(map(kind, op.inputs))}) -> ({', '.join(map(kind, op.outputs))})"
            + (f", {op.trips} times" if op.trips > 1 else "") + (f"  # {op.where}" if op.where else "")
        )  # fmt: skip
    return "\n".join(lines)


# ---- plain data


def _data(plan: Plan, arrivals: Sequence[str]) -> dict[str, Any]:
    hardware, cost = plan.hardware, plan.cost
    return {
        "schema": SCHEMA,
        "function": plan.function,
        "hardware": {"name": hardware.name, "platform": hardware.platform, "devices": hardware.count,
                     "is_here": hardware.is_here, "chip": dataclasses.asdict(hardware.chip)},
        "level": plan.level,
        "policy": plan.policy,
        "grid": [{"axis": name, "size": size, "stride": stride} for name, size, stride in strides(plan)],
        "order": plan.order,
        "inputs": [_decided(d) for d in plan.inputs],
        "outputs": [_decided(d) for d in plan.outputs],
        "dimension_groups": [dataclasses.asdict(c) for c in plan.dimension_groups],
        "ops": [dataclasses.asdict(o) for o in op_strategies(plan)],
        "collectives": [
            {**_sent(c), "time_s": seconds(plan, c), "cause": {"op": c.cause, "strategies": cuts}}
            for c, cuts in sorted(zip(plan.collectives, owners(plan), strict=True), key=lambda pair: -seconds(plan, pair[0]))
        ],
        "price": {"flops": cost.flops, "bytes_sent": cost.bytes_sent, "compute_s": cost.compute_s,
                  "communication_s": cost.communication_s, "time_s": cost.time_s,
                  "unpriced": cost.unmodelled_ops},
        "gap": plan.gap,
        "runner_up": plan.runner_up,
        "constraints": [dataclasses.asdict(c) for c in plan.constraints],
        "candidates": [dataclasses.asdict(c) for c in plan.candidates],
        "memory": {**dataclasses.asdict(cost.memory), "peak": cost.memory.peak, "device": hardware.chip.memory_bytes},
        "findings": plan.diagnostics,
        "arrivals": list(arrivals),
        "compiled": None,
    }  # fmt: skip


def _decided(d: Decision) -> dict[str, Any]:
    return {**dataclasses.asdict(d), "local_shape": d.local_shape}


def _compared(found: Compiled, compared: Comparison) -> dict[str, Any]:
    return {
        # Of a compiled collective the groups are known, not the axes, nor what it is due to.
        "collectives": [{k: v for k, v in _sent(c).items() if k not in ("axes", "cause")} for c in found.collectives],
        "kinds": {kind: {"predicted": dataclasses.asdict(p), "compiled": dataclasses.asdict(c)}
                  for kind, p, c in compared.kinds},
        "memory": {what: dataclasses.asdict(pair) for what, pair in compared.memory},
        "matrix_flops": dataclasses.asdict(compared.matrix_flops),
        "findings": found.diagnostics,
        "why": compared.why,
    }  # fmt: skip


def _sent(c: Collective) -> dict[str, Any]:
    return {**dataclasses.asdict(c), "total_bytes": c.total_bytes}

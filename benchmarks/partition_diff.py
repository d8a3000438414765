"""Where does the predicted partitioned program differ from XLA's? Both side by side, op by op, for a row of `truth.py`.

XLA's side is its own dump after `spmd-partitioning`, before fusion and before collectives are merged. Ops are compared by
source line, kind and shape on one device. Both sides leave out scalars and ops that only move an array in its memory.
Run: python benchmarks/partition_diff.py [TEXT ...] [--all], where each TEXT is part of a row's name; without one, the rows of
`truth.py --quick`. `--drift` runs every row and prints what differs otherwise than in `drift.json`, which `--record` writes: what
another JAX release changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks import harness, truth
from shardfn.compiled import hlo
from shardfn.ir.source_lines import file_line
from shardfn.planning.plan import Plan

LEFT_OUT = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "copy", "reshape", "transpose", "broadcast", "iota",
     "partition-id", "reshard", "opt-barrier", "optimization-barrier", "while", "conditional", "call")
)  # fmt: skip
"""Kinds that are not compared: they only move an array in its memory, or stand for the ops inside them."""

NAMES = {
    "dot-general": "dot", "all-slice": "dynamic-slice", "broadcast-in-dim": "broadcast", "case": "conditional",
    "square": "multiply", "top-k": "topk",
}  # fmt: skip
"""The names that HLO has for kinds that StableHLO, or the prediction, calls otherwise."""

DTYPES = {
    "i1": "pred",
    "complex<f32>": "c64",
    "complex<f64>": "c128",
    **{f"i{n}": f"s{n}" for n in (8, 16, 32, 64)},
    **{f"ui{n}": f"u{n}" for n in (8, 16, 32, 64)},
}

RECORD = pathlib.Path(__file__).with_name("drift.json")
"""What differs with the JAX release that is named there, by row."""

OPTIONS = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": "spmd-partitioning"}


@dataclasses.dataclass(frozen=True)
class OnOneDevice:
    """An op with the dtype and the shape of its first result on one device."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def key(self) -> tuple[str, str, int]:
        """What is compared; the same elements may have another shape."""
        return self.kind, self.dtype, math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Line:
    """The ops that come from one line of the source: those of both sides, and those of one side alone."""

    where: str
    both: tuple[OnOneDevice, ...]
    predicted: tuple[OnOneDevice, ...]
    real: tuple[OnOneDevice, ...]


def lines(plan: Plan, dump: str) -> list[Line]:
    """The lines of a program, in the order of the prediction. An op that the two sides have at different lines is equal too.

    Args:
      plan: the plan.
      dump: XLA's program after partitioning, as HLO text.
    """
    predicted, real = list(_predicted(plan)), list(_real(dump))
    places = dict.fromkeys(where for where, _ in (*predicted, *real))
    both: dict[str, list[OnOneDevice]] = {where: [] for where in places}
    for key in (lambda where, op: (where, op.key), lambda where, op: op.key):  # at the same line first
        left: dict[object, list[tuple[str, OnOneDevice]]] = {}
        for row in real:
            left.setdefault(key(*row), []).append(row)
        alone = []
        for where, op in predicted:
            if rows := left.get(key(where, op)):
                real.remove(rows.pop(0))
                both[where].append(op)
            else:
                alone.append((where, op))
        predicted = alone
    sides = [{at: tuple(op for where, op in side if where == at) for at in places} for side in (predicted, real)]
    return [Line(where, tuple(both[where]), sides[0][where], sides[1][where]) for where in places]


def _predicted(plan: Plan) -> Iterator[tuple[str, OnOneDevice]]:
    partitioned = plan.partitioned
    for op in partitioned.graph.ops:
        kind = op.name.split()[0].replace("_", "-")  # the target of a custom call follows its name
        v = op.outputs[0] if op.outputs else -1
        if NAMES.get(kind, kind) not in LEFT_OUT and v >= 0 and math.prod(partitioned.local_shape(v)) > 1:
            if op.name == "all_slice" and partitioned.local_shape(op.inputs[0]) == partitioned.local_shape(v):
                continue  # it ends a reduction
            dtype = partitioned.graph.values[v].dtype
            shape = tuple(partitioned.local_shape(v))
            yield file_line(op.where), OnOneDevice(NAMES.get(kind, kind), DTYPES.get(dtype, dtype), shape)


def _real(dump: str) -> Iterator[tuple[str, OnOneDevice]]:
    for module in hlo.modules(dump):
        yield from _inside(module, module.entry)


def _inside(module: hlo.Module, computation: str) -> Iterator[tuple[str, OnOneDevice]]:
    for it in module.computations[computation].values():
        if it.opcode not in hlo.REDUCERS:
            for name in hlo.called(it).values():
                yield from _inside(module, name)
        form = re.search(r"(\w+)\[([\d,]*)\]", it.type)
        shape = tuple(map(int, filter(None, form[2].split(",")))) if form else ()
        if (
            form
            and it.opcode not in LEFT_OUT
            and math.prod(shape) > 1
            and not _removes_ones(module.computations[computation], it)
        ):
            frame = re.search(r"stack_frame_id=(\d+)", it.attributes)
            where = module.lines.get(int(frame[1]), "") if frame else ""
            yield file_line(where), OnOneDevice(it.opcode, form[1], shape)


def _removes_ones(computation: hlo.Computation, it: hlo.Instruction) -> bool:
    """Whether a reduction combines nothing: XLA writes a reshape so."""
    source = computation.get(it.operands[0][0])
    return it.opcode == "reduce" and source is not None and _elements(source.type) == _elements(it.type)


def _elements(type_: str) -> int:
    form = re.search(r"\[([\d,]*)\]", type_)
    return math.prod(map(int, filter(None, form[1].split(",")))) if form else 0


def partitioned_by_xla(function: Any, args: Sequence[Any]) -> str:
    """XLA's program after `spmd-partitioning`, as HLO text.

    Args:
      function: a sharded function.
      args: its arguments, or their shapes.
    """
    with tempfile.TemporaryDirectory() as folder:
        function.lower(*args).compile({"xla_dump_to": folder, **OPTIONS})
        return "\n".join(path.read_text() for path in sorted(pathlib.Path(folder).glob("*after_spmd-partitioning*")))


def text(found: Sequence[Line], every: bool) -> Iterator[str]:
    """The lines side by side: the ops that one side has alone, or every one."""
    different = [line for line in found if line.predicted or line.real]
    for line in found if every else different:
        yield line.where or "no source line"
        columns = [
            *((op, op) for op in line.both if every),
            *itertools.zip_longest(line.predicted, line.real, fillvalue=""),
        ]
        for one, other in columns:
            yield f"  {one!s:<44} {other}".rstrip()
    yield f"{len(found) - len(different)} of {len(found)} source lines have the same ops"


def differences(found: Sequence[Line]) -> list[str]:
    """The ops that one side has alone, whatever their source line, as text."""
    return sorted(
        f"{name} {op}"
        for line in found
        for name, side in (("predicted", line.predicted), ("XLA", line.real))
        for op in side
    )


def drift(now: dict[str, list[str]], before: dict[str, list[str]]) -> Iterator[str]:
    """What differs now and did not before, and the reverse, by row."""
    for name in dict.fromkeys((*now, *before)):
        new, old = Counter(now.get(name, ())), Counter(before.get(name, ()))
        changes = [*(f"  + {op}" for op in (new - old).elements()), *(f"  - {op}" for op in (old - new).elements())]
        if changes:
            yield "\n".join([name, *changes])


def main() -> None:
    """Print the rows that are asked for, or what changed in all of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="TEXT", help="rows of truth.py whose name holds one of these")
    parser.add_argument("--all", action="store_true", help="also the ops that agree")
    parser.add_argument("--drift", action="store_true", help="what changed since drift.json was recorded, in every row")
    parser.add_argument("--record", action="store_true", help="write drift.json")
    options = harness.parse(parser, devices=truth.DEVICES)
    is_every = options.drift or options.record
    found = [case for case in truth.cases() if is_every or any(name in case.name for name in options.names)]
    found = found if options.names or is_every else [case for case in truth.cases() if case.quick]
    if not found:
        parser.error(
            f"no row's name holds {' or '.join(map(repr, options.names))}: python benchmarks/truth.py lists them"
        )
    now: dict[str, list[str]] = {}
    for case in found:
        function, args = truth.sharded(case)
        of_case = lines(function.plan(*args), partitioned_by_xla(function, args))
        now[case.name] = differences(of_case)
        if not is_every:
            print(f"{case.name}\n  {'predicted':<44} XLA")
            print("\n".join(text(of_case, options.all)) + "\n", flush=True)
    harness.save(options.json, {"ops": [{"row": name, "op": op} for name, ops in now.items() for op in ops]})
    if options.record:
        RECORD.write_text(
            json.dumps({"jax": jax.__version__, "rows": {k: v for k, v in now.items() if v}}, indent=1) + "\n"
        )
    if options.drift:
        before = json.loads(RECORD.read_text())
        changed = list(drift(now, before["rows"]))
        print("\n".join(changed))
        print(
            f"{len(changed)} of {len(now)} rows differ otherwise with JAX {jax.__version__} than with {before['jax']}"
        )


if __name__ == "__main__":
    main()

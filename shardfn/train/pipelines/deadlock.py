"""Whether the stages of a pipeline, as XLA compiles them, would wait for devices that never come.

Stages take different branches of one program. A collective in a branch is met by the devices of that stage alone, so its
groups must lie within the stage; one that waits for others waits for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from jax.sharding import Mesh
from jax.stages import Lowered

from shardfn.compiled.conditionals import Branched, in_branches
from shardfn.errors import Problem, raise_problems
from shardfn.ir.rewrite import line_of
from shardfn.train.pipelines.program import Op
from shardfn.train.pipelines.stages import OP, Stage

_QUICK = {"cpu": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}}
"""Options with which a backend makes the same collectives sooner; what it compiles so is only read."""


def check_waits(lowered: Lowered, mesh: Mesh, stages: Sequence[Stage], cut: Callable[[int], str]) -> None:
    """Compile a pipeline and look where its stages wait.

    Args:
      lowered: the beats of a schedule.
      mesh: its devices, those of a stage side by side.
      stages: the branches.
      cut: the path of a leaf of the parameters that lies in pieces, "" for one that does not.

    Raises:
      StrategyError: a stage would wait for devices of another, for ever.
    """
    options = _QUICK.get(mesh.devices.flat[0].platform)
    text = lowered.compile(compiler_options=options).as_text() or ""
    per_stage = mesh.size // mesh.devices.shape[0]
    raise_problems(list(dict.fromkeys(_problem(one, stages[one.branch], cut) for one in waiting(text, per_stage))))


def waiting(hlo_text: str, per_stage: int) -> tuple[Branched, ...]:
    """The collectives in branches that wait for devices of several stages, each of which has so many side by side."""
    crosses = lambda group: len({device // per_stage for device in group}) > 1  # noqa: E731
    return tuple(one for one in in_branches(hlo_text) if any(map(crosses, one.groups)))


def _problem(one: Branched, stage: Stage, cut: Callable[[int], str]) -> Problem:
    number = re.search(rf"{OP}(\d+)", one.name)
    op = stage.ops[int(number[1])] if number else None
    paths = [path for leaf in (stage.leaves if op is None else _leads_to(op, stage)) if (path := cut(leaf))]
    names = ", ".join(f"`{path}`" for path in paths[:4]) + (", ..." if len(paths) > 4 else "")
    line = line_of(op.eqn) if op else ""
    what = f"`{op.eqn.primitive.name}`{f' at {line}' if line else ''}" if op else "an op that is not known"
    return Problem(
        f"pipeline stage {one.branch} would wait for devices of other stages, for ever",
        f"{what}, in pieces over the devices of a stage; XLA gives it one {one.kind} or more",
        "stages are branches of one program, and devices that take another branch never come to this collective",
        f"in parameter_plan leave {names or 'the parameters of this stage'} whole, or cut along another dim",
    )


def _leads_to(op: Op, stage: Stage) -> Iterator[int]:
    """The leaves of the parameters that an op's inputs come from, within the stage."""
    makers = {o: one for one in stage.ops for o in one.outputs}
    todo, seen = list(op.reads()), set[int]()
    while todo:
        value = todo.pop()
        if value not in seen:
            seen.add(value)
            todo += makers[value].reads() if value in makers else ()
    return (leaf for leaf in stage.leaves if leaf in seen)

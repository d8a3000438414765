"""Deadlock check: whether a compiled pipeline stage would wait for devices that run another stage.

Stages are branches of one program. Only the devices of a stage reach a collective in its branch, so the collective's
groups must lie within the stage; otherwise the program hangs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import Mesh
from jax.stages import Lowered

from shardfn.compiled.hlo import Branched, in_branches
from shardfn.errors import Problem, raise_problems
from shardfn.ir.rewrite import equation_line
from shardfn.train.flat_jaxpr import FlatEquation
from shardfn.train.pipelines.stages import EQUATION_SCOPE, Stage

_FAST_COMPILE = {"cpu": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}}
"""Options that give the same collectives sooner; the check only reads the compiled module."""


def check_no_deadlock(lowered: Lowered, mesh: Mesh, stages: Sequence[Stage], sharded: Mapping[int, str]) -> None:
    """Compile a pipeline and check that no stage waits for another.

    Args:
      lowered: the pipeline's program.
      mesh: its devices, those of a stage contiguous.
      stages: the branches.
      sharded: the paths of the parameters that are sharded within a stage, by leaf.

    Raises:
      StrategyError: a stage would wait for devices of another stage forever.
    """
    options = _FAST_COMPILE.get(mesh.devices.flat[0].platform)
    text = lowered.compile(compiler_options=options).as_text() or ""
    per_stage = mesh.size // mesh.devices.shape[0]
    raise_problems(list(dict.fromkeys(_problem(one, stages[one.branch], sharded) for one in waiting(text, per_stage))))


def waiting(hlo_text: str, per_stage: int) -> tuple[Branched, ...]:
    """The collectives in branches whose groups span several stages of `per_stage` contiguous devices each."""
    crosses = lambda group: len({device // per_stage for device in group}) > 1  # noqa: E731
    return tuple(one for one in in_branches(hlo_text) if any(map(crosses, one.groups)))


def _problem(one: Branched, stage: Stage, sharded: Mapping[int, str]) -> Problem:
    number = re.search(rf"{EQUATION_SCOPE}(\d+)", one.name)
    op = stage.equations[int(number[1])] if number else None
    paths = [sharded[leaf] for leaf in (stage.leaves if op is None else _sources(op, stage)) if leaf in sharded]
    names = ", ".join(f"`{path}`" for path in paths[:4]) + (", ..." if len(paths) > 4 else "")
    line = equation_line(op.eqn) if op else ""
    what = f"`{op.eqn.primitive.name}`{f' at {line}' if line else ''}" if op else "an unknown op"
    return Problem(
        f"pipeline stage {one.branch} would wait for devices of other stages forever",
        f"{what}, sharded over the devices of a stage; XLA inserts at least one {one.kind} across stages",
        "stages are branches of one program, and devices in another branch never reach this collective",
        f"in parameter_plan leave {names or 'the parameters of this stage'} unsharded, or shard another dimension",
    )


def _sources(op: FlatEquation, stage: Stage) -> Iterator[int]:
    """The parameters that an op's inputs come from, within the stage."""
    makers = {o: one for one in stage.equations for o in one.outputs}
    todo, seen = list(op.reads), set[int]()
    while todo:
        value = todo.pop()
        if value not in seen:
            seen.add(value)
            todo += makers[value].reads if value in makers else ()
    return (leaf for leaf in stage.leaves if leaf in seen)

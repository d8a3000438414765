"""MindSpore's `shard` of functions and of Cells beside ours."""

import pytest

import shardfn
from shardfn import ShardError
from tests.conformance import facts
from tests.conformance.deviations import ACCEPTS, row_of
from tests.conformance.functions import ask_of, call_of
from tests.conformance.running import assert_same, attempt, slices_said

CASES = facts.load("shard_function")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_function(case, tally):
    made, ask = call_of(case), ask_of(case)
    row = row_of(ask)

    def run():
        return attempt(
            made.target, made.args, made.strategy, made.out, case.devices, case.ctx, parameter_plan=made.plan
        )

    if not (row.does == ACCEPTS if row else case.accepted):
        with pytest.raises(ShardError):
            run()
        tally(f"refused here only: {row}" if row else "refused alike")
        return
    outcome = run()
    assert outcome.received == outcome.planned
    assert_same(outcome.value, made.target(*made.args))
    if made.out is not None and made.out != (None,):
        assert tuple(d.strategy for d in outcome.plan.outputs) == made.out
    planned = {d.path: d.local_shape for d in outcome.plan.inputs}
    stated = {name for name, entry in zip(made.names, made.entries, strict=True) if entry is not shardfn.AUTO}
    stated |= {path.removeprefix("self.") for path in made.plan or {}}
    if row:
        wanted = dict(zip(made.names, slices_said(ask), strict=True))
    else:
        wanted = {name: held.slice_shape for name, held in case.inputs.items()}
    assert {name: planned[name] for name in stated} == {name: wanted[name] for name in stated}
    if row:
        tally(f"accepted here only: {row}")
        return
    tally("accepted alike")
    for name in wanted.keys() - stated:
        tally(f"  an open argument, cut {'alike' if planned[name] == wanted[name] else 'by another choice'}")

"""Single operators: MindSpore's `ops.X().shard(...)` beside `shard` of the same function in JAX."""

import functools

import jax
import pytest

from shardfn import ShardError
from tests.conformance import facts
from tests.conformance.deviations import ACCEPTS, CLASH, row_of
from tests.conformance.programs import ask_of, program
from tests.conformance.running import assert_same, attempt, same_ranks, slices_said

CASES = facts.load("single_op")


@functools.cache
def unsharded(ctor, call, op, shapes):
    made = program(facts.Case("", "", op, True, ctor=ctor, call=call, shapes=shapes))
    return jax.jit(made.fn)(*made.args)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator(case, tally):
    made, ask = program(case), ask_of(case)
    row = row_of(ask)
    run = functools.partial(attempt, made.fn, made.args, made.strategy, ask.out, case.devices)
    if not (row.does == ACCEPTS if row else case.accepted):
        with pytest.raises(ShardError):
            run()
        tally(f"refused here only: {row}" if row else "refused alike")
        return
    try:
        outcome = run()
    except ShardError as error:
        assert CLASH in str(error) and not case.accepted
        tally("refused alike")
        return
    wanted = slices_said(ask) if row else [h.slice_shape for h in case.held]
    for planned, slice_shape in zip(outcome.planned, wanted, strict=False):  # MindSpore lays out no scalars
        assert slice_shape in (None, planned)
    if outcome.received is not None:
        assert outcome.received == outcome.planned
        assert_same(outcome.value, unsharded(case.ctor, case.call, case.op, case.shapes))
    if ask.out is not None:
        assert outcome.plan.outputs[0].strategy == cuts_of(ask.out[0])
    if row is None:
        same = same_ranks(outcome.plan, case.inputs)
        # a layout says which rank holds what; of cuts, both list the classes as they appear, unless MindSpore doesn't
        assert same or not (ask.layouts or facts.in_order(case.inputs, case.shapes))
        tally(f"accepted alike, {'the same slices on the same ranks' if same else 'the same slices on other ranks'}")
    else:
        tally(f"{'laid out otherwise' if case.accepted else 'accepted here only'}: {row}")


def cuts_of(entry):
    return entry.cuts if isinstance(entry, facts.LayoutFact) else entry

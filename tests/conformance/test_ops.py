"""Single operators: MindSpore's `ops.X().shard(...)` beside `shard` of the same function in JAX."""

import functools

import jax
import pytest

from shardfn import ShardError
from tests.conformance import facts, ops
from tests.conformance.deviations import ACCEPTS, Ask, row_of
from tests.conformance.running import assert_same, attempt, expected_slices, same_ranks

CASES = facts.load("single_op")


def ask_of(case):
    made = ops.program(case)
    return Ask(case, made.shapes, made.strategy, made.letters, case.out or made.results, made.needs, made.lays_result,
               made.results is not None)  # fmt: skip


@functools.cache
def unsharded(ctor, call, op, shapes):
    made = ops.program(facts.Case("", "", op, True, ctor=ctor, call=call, shapes=shapes))
    return jax.jit(made.fn)(*made.args)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator(case, tally):
    made, ask = ops.program(case), ask_of(case)
    row = row_of(ask)
    run = functools.partial(attempt, made.fn, made.args, made.strategy, ask.out, case.devices)
    if not (row.does == ACCEPTS if row else case.accepted):
        with pytest.raises(ShardError):
            run()
        tally(f"refused here only: {row}" if row else "refused alike")
        return
    outcome = run()
    slices = expected_slices(ask, row)
    if slices is not None:  # scalars that the call spells out have no fact
        assert outcome.planned[: len(slices)] == slices
    if outcome.received is not None:
        assert outcome.received == outcome.planned
        assert_same(outcome.value, unsharded(case.ctor, case.call, case.op, case.shapes))
    if ask.out is not None:
        assert outcome.plan.outputs[0].cuts == cuts_of(ask.out[0])
    if row is None:
        same = same_ranks(outcome.plan, case.inputs)
        # a layout says which rank holds what; of cuts, both list the classes as they appear, unless MindSpore doesn't
        assert same or not (ask.layouts or facts.in_order(case.inputs, case.shapes))
        tally(f"accepted alike, {'the same slices on the same ranks' if same else 'the same slices on other ranks'}")
    else:
        tally(f"{'laid out otherwise' if case.accepted else 'accepted here only'}: {row}")


def cuts_of(entry):
    return entry.cuts if isinstance(entry, facts.LayoutFact) else entry

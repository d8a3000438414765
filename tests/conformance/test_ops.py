"""Single operators: MindSpore's `ops.X().shard(...)` beside `shard` of the same function in JAX."""

import functools

import jax
import numpy as np
import pytest

import shardfn.mindspore as ms
from shardfn import ShardError
from tests.conformance import facts
from tests.conformance.deviations import ACCEPTS, CLASH, row_of
from tests.conformance.programs import ask_of, program
from tests.conformance.running import assert_same, attempt, same_ranks, slices_said

ALL = facts.load("single_op")
UNEVEN = [case for case in ALL if "manual_split" in case.attrs]
CASES = [case for case in ALL if case not in UNEVEN]


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


@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_operator_with_uneven_rows(case, tally):
    rows = case.attrs["manual_split"]
    gather = ms.Gather().add_prim_attr("manual_split", rows).shard(case.strategy)
    table = np.random.default_rng(0).normal(size=case.shapes[0]).astype(np.float32)
    first = np.cumsum([0, *rows])
    random = np.random.default_rng(1)
    block = case.shapes[1][1] // len(rows)
    ids = np.concatenate(
        [random.integers(first[i], first[i] + n, (case.shapes[1][0], block)) for i, n in enumerate(rows)], 1
    )
    ids = np.resize(ids, case.shapes[1]).astype(np.int32)
    if not case.accepted:
        with pytest.raises(ShardError):
            gather(table, ids)
        tally("refused alike")
        return
    held, value = gather.held(table, ids), gather(table, ids)
    assert_same(value, jax.numpy.asarray(table[ids]))
    for rank, shard in enumerate(sorted(held.addressable_shards, key=lambda s: s.device.id)):
        np.testing.assert_array_equal(np.asarray(shard.data)[0, : rows[rank]], table[first[rank] : first[rank + 1]])
        assert not np.asarray(shard.data)[0, rows[rank] :].any()
    assert (rows[0], case.shapes[0][1]) == case.held[0].slice_shape
    assert {s.data.shape[1] for s in value.addressable_shards} == {case.held[1].slice_shape[1]}
    tally("accepted alike, the same slices on the same ranks")


def cuts_of(entry):
    return entry.cuts if isinstance(entry, facts.LayoutFact) else entry

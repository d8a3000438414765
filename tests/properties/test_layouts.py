"""From cuts to the bytes on each device: plan, Layout, tensor map, slices, and the arrays themselves, all say the same."""

import dataclasses

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import shardfn
from shardfn.mindspore.layout import Layout
from shardfn.mindspore.parallel import layout_of
from tests.properties.programs import device_ids


@dataclasses.dataclass(frozen=True)
class Asked:
    """Arrays with cuts; `tied` adds them up where they have one shape, so that their dims are one."""

    devices: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    cuts: tuple[tuple[int, ...], ...]
    tied: bool


@st.composite
def asked(draw):
    devices = draw(device_ids())
    tied = draw(st.booleans())
    rank = draw(st.integers(0, 3))
    cuts = []
    for _ in range(draw(st.integers(1, 3))):
        left = len(devices)
        row = []
        for _ in range(rank if tied else draw(st.integers(0, 3))):
            row.append(draw(st.sampled_from([c for c in range(1, left + 1) if left % c == 0])))
            left //= row[-1]
        cuts.append(tuple(row))
    if tied:
        common = [int(np.lcm.reduce(column)) * draw(st.integers(1, 2)) for column in zip(*cuts, strict=True)]
        shapes = [tuple(common)] * len(cuts)
    else:
        shapes = [tuple(c * draw(st.integers(1, 3)) for c in row) for row in cuts]
    return Asked(devices, tuple(shapes), tuple(cuts), tied)


def held_by(sharding, shape, rank_of):
    """{rank: its slices as (start, stop) pairs}."""
    found = sharding.devices_indices_map(shape)
    return {rank_of[d.id]: pairs(slices, shape) for d, slices in found.items()}


def pairs(slices, shape):
    return [s.indices(n)[:2] for s, n in zip(slices, shape, strict=True)]


@given(asked())
def test_every_rank_holds_the_slice_that_its_layout_says(ask):
    devices = [jax.devices()[d] for d in ask.devices]
    arrays = [np.arange(np.prod(shape), dtype=np.int32).reshape(shape) for shape in ask.shapes]
    sharded = shardfn.shard(lambda *xs: (*xs, sum(xs)) if ask.tied else xs, ask.cuts, device=devices)
    try:
        plan = sharded.plan(*arrays)
    except shardfn.errors.StrategyError as error:
        assert ask.tied and all("hold together" in p.what for p in error.problems)
        hypothesis.event("refused")
        return
    want = (*arrays, sum(arrays)) if ask.tied else arrays
    compiled = sharded.lower(*arrays).compile()
    results = compiled(*arrays)
    rank_of = {d: rank for rank, d in enumerate(ask.devices)}
    for decision, sharding in zip(plan.inputs, compiled.input_shardings[0], strict=True):
        assert held_by(sharding, decision.shape, rank_of) == held_by(
            NamedSharding(plan.mesh, decision.partition_spec), decision.shape, rank_of
        )

    for decision, whole, lies in (
        *zip(plan.inputs, arrays, compiled.input_shardings[0], strict=True),
        *((d, w, r.sharding) for d, w, r in zip(plan.outputs, want, results, strict=True)),
    ):
        layout = layout_of(plan, decision.path)
        assert layout.strategy == decision.strategy
        assert layout.slice_shape(whole.shape) == decision.local_shape == lies.shard_shape(whole.shape)
        assert layout == Layout.from_sharding(NamedSharding(plan.mesh, decision.partition_spec), whole.ndim, devices)
        numbers = Layout.from_tensor_map(layout.device_matrix, layout.tensor_map)
        assert numbers.slices(whole.shape) == layout.slices(whole.shape)
        said = {
            rank: pairs(s, whole.shape) for rank, s in zip(layout.rank_list, layout.slices(whole.shape), strict=True)
        }
        assert held_by(lies, whole.shape, rank_of) == said

    for decision, whole, result in zip(plan.outputs, want, results, strict=True):
        layout = layout_of(plan, decision.path)
        data = {rank_of[s.device.id]: np.asarray(s.data) for s in result.addressable_shards}
        for rank, slices in zip(layout.rank_list, layout.slices(whole.shape), strict=True):
            np.testing.assert_array_equal(data[rank], whole[slices])


@pytest.mark.slow
@given(asked(), st.data())
def test_an_out_strategy_lies_where_it_is_asked_to(ask, data):
    """A lone result needs no communication to be thought of: its layout is the one of a lone array."""
    devices = [jax.devices()[d] for d in ask.devices]
    shape, cuts = ask.shapes[0], ask.cuts[0]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    whole = data.draw(st.booleans(), "whole on arrival")
    sharded = shardfn.shard(lambda x: x + 1, ((1,) * x.ndim if whole else shardfn.AUTO,), (cuts,), device=devices)
    result, plan = sharded(x), sharded.plan(x)
    assert plan.outputs[0].strategy == (cuts if len(devices) > 1 else (1,) * x.ndim)
    lone = Layout.from_strategy(cuts, len(devices)) if len(devices) > 1 else Layout((1,), ("a",))(*["None"] * x.ndim)
    rank_of = {d: rank for rank, d in enumerate(ask.devices)}
    for shard in result.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), (x + 1)[lone.slices(shape)[rank_of[shard.device.id]]])

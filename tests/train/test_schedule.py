"""Schedules: every unit once, in an order in which what it needs is there, and as idle as the formula says."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfn.train.pipelines.schedule import BACKWARD, FORWARD, SCHEDULES, schedule

SIZES = st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 15), st.integers(1, 4))


def done(made):
    """(kind, micro, stage) -> (number of the tick, number among beats of its kind, device, slot)."""
    found, counts = {}, {FORWARD: 0, BACKWARD: 0}
    for i, tick in enumerate(made.ticks):
        for device, unit in enumerate(tick.units):
            if unit is not None:
                key = tick.kind, unit.micro, unit.chunk * made.devices + device
                assert key not in found, "twice"
                found[key] = (i, counts[tick.kind], device, unit.slot)
        counts[tick.kind] += 1
    return found


@given(SIZES)
def test_every_unit_once_and_after_what_it_needs(size):
    _, devices, micro, chunks = size
    made = schedule(*size)
    at = done(made)
    stages = devices * chunks
    assert set(at) == set(itertools.product((FORWARD, BACKWARD), range(micro), range(stages)))
    for m, stage in itertools.product(range(micro), range(stages)):
        if stage:
            # what a neighbour sends is used in the very next tick of that kind: nothing waits in between
            assert at[FORWARD, m, stage][1] == at[FORWARD, m, stage - 1][1] + 1
            assert at[BACKWARD, m, stage - 1][1] == at[BACKWARD, m, stage][1] + 1
        assert at[BACKWARD, m, stage][0] > at[FORWARD, m, stage][0]
        assert at[BACKWARD, m, stage][3] == at[FORWARD, m, stage][3]


@given(SIZES)
def test_a_slot_is_free_before_it_is_used_again(size):
    made = schedule(*size)
    held = set()
    for tick in made.ticks:
        for device, unit in enumerate(tick.units):
            if unit is not None:
                key = device, unit.slot
                assert (key in held) == (tick.kind == BACKWARD)
                (held.remove if key in held else held.add)(key)
    assert not held


@given(SIZES.filter(lambda size: size[3] == 1 or size[2] % size[1] == 0))
def test_bubble_is_the_formula(size):
    _, devices, micro, chunks = size
    made = schedule(*size)
    assert made.bubble == pytest.approx((devices - 1) / (chunks * micro + devices - 1))
    kinds = [tick.kind for tick in made.ticks]
    assert kinds.count(FORWARD) == kinds.count(BACKWARD) == chunks * micro + devices - 1


@given(st.integers(1, 6), st.integers(1, 26))
def test_inputs_kept(devices, micro):
    assert schedule("gpipe", devices, micro).slots == micro
    made = schedule("1f1b", devices, micro)
    assert made.slots == min(micro, 2 * devices - 1)
    kept = [0] * devices
    for _, _, device, slot in done(made).values():
        kept[device] = max(kept[device], slot + 1)
    assert kept == [min(micro, 2 * (devices - d) - 1) for d in range(devices)]


@pytest.mark.parametrize(("devices", "chunks"), [(2, 2), (4, 2), (3, 3)])
def test_interleaved_keeps_no_more_with_more_micro_batches(devices, chunks):
    few, many = (schedule("1f1b", devices, n * devices, chunks).slots for n in (3, 30))
    assert few == many == (chunks - 1) * devices + 2 * devices - 1


def test_forward_only():
    made = schedule(FORWARD, 3, 5, 2)
    assert {tick.kind for tick in made.ticks} == {FORWARD}
    assert len(done(made)) == 5 * 6


def test_text():
    assert str(schedule("1f1b", 3, 4)) == (
        "device 0: F0 F1 F2 -- F3 -- -- B0 -- B1 B2 B3\n"
        "device 1: -- F0 F1 -- F2 B0 F3 B1 -- B2 B3 --\n"
        "device 2: -- -- F0 B0 F1 B1 F2 B2 F3 B3 -- --\n"
        "1f1b, 3 devices x 1 chunk, 4 micro-batches: bubble 2/6 = 33.3%, at most 4 inputs kept"
    )

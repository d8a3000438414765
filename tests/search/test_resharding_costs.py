"""The cost of resharding on mesh axes depends only on the order of the sharded dimensions."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardfn.cost.collectives import bytes_sent
from shardfn.cost.devices.hardware import CHIPS, resolve
from shardfn.ir.divisors import primes
from shardfn.partition.resharding import resharding_steps
from shardfn.search.labels import MeshModel, resharding_cost, resharding_costs


@st.composite
def moves(draw):
    """The sizes of mesh axes, and the dimension of an array of rank 4 that each of them shards, before and after."""
    sizes = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    dims = st.lists(st.integers(-1, 3), min_size=len(sizes), max_size=len(sizes))
    return sizes, tuple(draw(dims)), tuple(draw(dims))


@given(moves())
@example(((64, 4), (-1, 1), (2, 0)))
def test_resharding_path_is_that_of_the_partitioner(move):
    """`resharding_steps` on the dimensions themselves, with an unsharded one at the end: unsharded dimensions in between do not count."""
    sizes, *rows = move
    parts = [[f"{axis}:{at}" for at in range(len(primes(n)))] for axis, n in enumerate(sizes)]
    of = {name: n for row, size in zip(parts, sizes, strict=True) for name, n in zip(row, primes(size), strict=True)}
    before, after = (
        tuple(tuple(name for axis, at in enumerate(row) if at == dim for name in parts[axis]) for dim in range(5))
        for row in rows
    )
    steps = [step for step in resharding_steps(before, after, of) if step.kind]
    found = resharding_costs._path((*rows[0], *rows[1]), sizes)
    assert [kind for kind, *_ in found] == [step.kind for step in steps]
    for (_, taken, _), step in zip(found, steps, strict=True):
        assert {axis for axis, _ in taken} == {int(name[0]) for name in step.axes}
        assert np.prod([n for _, n in taken]) == np.prod([of[name] for name in step.axes])


@pytest.mark.parametrize("sizes", [(4,), (2, 4), (8, 2)])
def test_resharding_cost_of_a_table_is_that_of_each_pair(sizes):
    on = MeshModel.on(CHIPS["h100"].pod(int(np.prod(sizes))), tuple(zip("abc", sizes, strict=False)))
    every = np.array(list(itertools.product(range(-1, 3), repeat=len(sizes))))
    sent, seconds = resharding_cost(every, every, 1e6, on)
    for i, j in itertools.product(range(0, len(every), 3), range(0, len(every), 5)):
        alone = resharding_cost(every[i : i + 1], every[j : j + 1], 1e6, on)
        assert (sent[i, j], seconds[i, j]) == (alone[0][0, 0], alone[1][0, 0])
    assert not np.diagonal(sent).any() and not np.diagonal(seconds).any()


@pytest.mark.parametrize(("target", "size", "is_reduced"), [("tpu-v5p:4x4x4", 1e9, True), ("tpu-v5e:8x8", 1e6, True),
                                                           ("tpu-v5e:8x8", 1e9, False), ("tpu-v5p:2x4x4", 1e6, False)])  # fmt: skip
def test_gather_over_all_chips_costs_what_the_evaluator_says(target, size, is_reduced):
    """On a mesh of one axis: an all-reduce sends twice the bytes of an all-gather."""
    hardware = resolve(target)
    on = MeshModel.on(hardware, (("a", hardware.count),))
    sent, seconds = (cost.item() for cost in resharding_cost(np.array([[0]]), np.array([[-1]]), size, on))
    kind = "all-reduce" if is_reduced else "all-gather"
    share = size if is_reduced else size / hardware.count
    assert sent == pytest.approx(bytes_sent(kind, hardware.count, int(share)), rel=1e-3)
    assert seconds == pytest.approx(on.links[0].seconds(kind, sent))

"""What the search pays for partial sums is what flows send for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardfn
from shardfn.cost.devices.hardware import resolve
from shardfn.cost.estimate import collectives
from shardfn.ir.model import OpConstraint
from shardfn.search.partial_sum_costs import PartialSums, reduction_cost
from shardfn.search.resharding_costs import MeshModel, spec_of_label
from tests.search.problems import S

AXES = (("a", 8), ("b", 2))


def kernel_gradient(x, y):
    convolved = lambda k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # noqa: E731
    return jax.vjp(convolved, jnp.zeros((3, 3, 16, 32)))[1](y)[0]


@pytest.mark.parametrize("cut", [[0, 1], [1, 0], [0, 0]], ids=str)
@pytest.mark.parametrize("made", [[-1, -1], [2, -1], [-1, 2], [2, 3], [2, 2]], ids=str)
def test_partial_sum_cost_of_a_convolution_is_what_the_program_sends(cut, made):
    """Over batch and height they are two sums, of which the last may be left in pieces."""
    args = S((16, 64, 8, 16), jnp.float32), S((16, 64, 8, 32), jnp.float32)
    problem = shardfn.plan(kernel_gradient, *args, device="h100:16")._answered.problem
    index, op = next(
        (i, op)
        for i, op in enumerate(problem.graph.ops)
        if op.name == "convolution" and problem.graph.values[op.outputs[0]].shape == (3, 3, 16, 32)
    )
    factor = [dim[0] for dim in op.rule.operands[0]]
    kept = [dim[0] for dim in op.rule.results[0]]
    work = np.array([[factor[dim] for dim in cut]])
    out = np.array([[kept[dim] if dim >= 0 else -1 for dim in made]])
    apart = [f for f in factor if f in op.rule.reduction]
    partial = np.array([4.0 * 3 * 3 * 16 * 32])
    sent, _ = PartialSums(work, out, np.isin(work, apart), apart, False, True).cost(
        partial, MeshModel.on(problem.hardware, AXES)
    )
    specs = tuple(spec_of_label(row, 4, "ab") for row in (cut, cut, made))
    partitioned = problem.partition(AXES, specs[:2], {index: OpConstraint(specs[:2], specs[2:])})
    added = [c for c in collectives(partitioned) if c.kind in ("all-reduce", "reduce-scatter")]
    assert sent.item() == sum(c.total_bytes for c in added)


@pytest.mark.parametrize(
    ("device", "whole", "pieces"), [("h100:8", 0.5, 0.0625), ("tpu-v5e:2x4", 0.125, 1.0), ("cpu:8", 0.0, 1.0)]
)
def test_reduction_cost_of_a_merged_sum_is_a_share_of_the_latency(device, whole, pieces):
    """By its result's bytes, of those of a full one: 30 MiB on GPUs, 120 MiB on TPUs, of which only all-reduces are merged."""
    grid = MeshModel.on(resolve(device), (("a", 8),))
    partial, here, none = np.array([15.0 * 2**20]), np.array([[True]]), np.array([[False]])
    no = np.array([False])
    for reduced, scattered, rate, share in ((here, none, 2, whole), (none, here, 1, pieces)):
        sent, seconds = reduction_cost(partial, reduced, scattered, grid, True, no, no)
        assert sent.item() == rate * 7 / 8 * partial.item()
        (link,) = grid.links
        assert seconds.item() == pytest.approx(sent.item() / link.bytes_s + share * link.latency_s)

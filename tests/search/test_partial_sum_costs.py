"""The latency of merged sums in the search's tables."""

import numpy as np
import pytest

from shardfn.cost.devices.hardware import resolve
from shardfn.search.labels import MeshModel
from shardfn.search.labels.partial_sum_costs import reduction_cost


@pytest.mark.parametrize(
    ("device", "all_reduced", "scattered_share"),
    [("h100:8", 0.5, 0.0625), ("tpu-v5e:2x4", 0.125, 1.0), ("cpu:8", 0.0, 1.0)],
)
def test_reduction_cost_of_a_merged_sum_is_a_share_of_the_latency(device, all_reduced, scattered_share):
    """By its result's bytes, of those of a full one: 30 MiB on GPUs, 120 MiB on TPUs, of which only all-reduces are merged."""
    mesh = MeshModel.on(resolve(device), (("a", 8),))
    partial, here, none = np.array([15.0 * 2**20]), np.array([[True]]), np.array([[False]])
    no = np.array([False])
    for reduced, scattered, rate, share in ((here, none, 2, all_reduced), (none, here, 1, scattered_share)):
        sent, seconds = reduction_cost(partial, reduced, scattered, mesh, True, no, no)
        assert sent.item() == rate * 7 / 8 * partial.item()
        (link,) = mesh.links
        assert seconds.item() == pytest.approx(sent.item() / link.bytes_s + share * link.latency_s)

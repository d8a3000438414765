"""One process of `test_processes`: loads with the others, notes what it reads itself, and prints what it saw as JSON."""

import json
import os
import sys

os.environ["NPROC"] = "32"

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardfn import data, halo
from shardfn.mindspore import Layout

IMAGES = np.random.default_rng(0).normal(size=(20, 8, 16)).astype("float32")
LABELS = np.arange(20)
ORDER = {"batch_size": 4, "shuffle": True, "seed": 3, "epochs": 2}
CASES = {
    "rows and windows": ((2, 2, 2), (2,)),
    "windows": ((1, 2, 4), (1,)),
    "columns": ((1, 1, 8), (1,)),
    "data_parallel": None,
    "full_batch": "full_batch",
}


class Watched:
    """An array that counts what it is asked for."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.bytes, self.reads = array, array.shape, array.dtype, 0, 0

    def __getitem__(self, window):
        found = self.array[window]
        self.bytes, self.reads = self.bytes + found.nbytes, self.reads + 1
        return found


def everywhere(array):
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def values_are_right(batch):
    image, label = map(everywhere, batch)
    np.testing.assert_array_equal(image, IMAGES[label])
    total = jax.jit(lambda x: x.sum())(batch[0])
    np.testing.assert_allclose(float(total), IMAGES[label].sum(), rtol=1e-4)
    return label.tolist()


def main(coordinator: str, process: int, processes: int, state: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // processes)
    jax.distributed.initialize(coordinator, processes, process, coordinator_bind_address=coordinator)
    assert jax.device_count() == 8 and len(jax.local_devices()) == 8 // processes
    told = {}
    for name, strategy in CASES.items():
        watched = Watched(IMAGES)
        order = ORDER | {"batch_size": 8} if strategy is None else ORDER
        batches = iter(data.load((watched, LABELS), strategy, **order, prefetch=0))
        batch = next(batches)
        values_are_right(batch)
        reads = [read for read in batches.reads if read.path == "0"]
        told[name] = {
            "bytes": watched.bytes,
            "told": sum(read.bytes for read in reads),
            "places": sorted(place for read in reads for place in read.devices),
            "piece": batch[0].sharding.shard_shape(batch[0].shape),
        }
    batches = iter(data.load((IMAGES, LABELS), CASES["rows and windows"], **ORDER))
    batches.set_state(json.loads(state))
    next(batches)
    told["state"] = batches.get_state()
    told["rest"] = [values_are_right(batch) for batch in batches]
    image = Watched(IMAGES[0])
    whole = data.read(image, (2, 4))
    np.testing.assert_array_equal(everywhere(whole), IMAGES[0])
    told["image"] = image.bytes
    kernel = np.random.default_rng(1).normal(size=(1, 1, 3, 3)).astype("float32")
    layout = Layout((2, 4), ("row", "column"))("None", "None", "row", "column")
    pieces = data.read(IMAGES[:1, None], layout)
    cut = everywhere(halo.conv(pieces, kernel, (1, 1), "SAME", layout=layout))
    np.testing.assert_allclose(cut, jax.lax.conv(IMAGES[:1, None], kernel, (1, 1), "SAME"), rtol=1e-4, atol=1e-5)
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

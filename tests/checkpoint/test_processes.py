"""Two processes on loopback: what one process saved they restore, and what they save one process restores."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardfn import checkpoint
from shardfn.cluster.launch import free_port
from tests.checkpoint.states import mesh, same

ROOT = pathlib.Path(__file__).parents[2]

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

first, second, address, number = *sys.argv[1:4], int(sys.argv[4])
jax.config.update("jax_num_cpu_devices", 4)
bind = {"coordinator_bind_address": address} if number == 0 else {}
jax.distributed.initialize(address, 2, number, **bind)
from shardfn import checkpoint
from shardfn.checkpoint import arrays

assert jax.device_count() == 8 and jax.process_count() == 2
whole = np.arange(512 * 256, dtype="float32").reshape(512, 256)
grid = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
rows = NamedSharding(grid, P(("x", "y")))
before = arrays.bytes_read()
back = checkpoint.restore(first, {"w": rows, "": NamedSharding(grid, P())})
told = checkpoint.reads(first, {"w": rows, "": NamedSharding(grid, P())})
assert len(told.needed) == 4
for shard in back["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, whole[shard.index])
    assert shard.data.shape == (64, 256)
assert back["step"] == 5
print("read", arrays.bytes_read() - before, "needed", sum(told.needed.values()), "chunks", sum(told.read.values()))
stored = checkpoint.restore(first)  # eight devices saved it, and here are eight
assert stored["w"].sharding.spec == P("a", "b")

state = {"w": back["w"] * 2, "b": back["b"], "key": jax.random.key(3), "step": 6}
for step in (6, 7, 8):
    saving = checkpoint.save(second, {**state, "step": step}, step=step, keep=2, background=step == 7)
    double = jax.jit(lambda w: w * 1.0)(state["w"]).block_until_ready()  # the devices work on meanwhile
saving.wait()
assert checkpoint.steps(second) == (7, 8), checkpoint.steps(second)
again = checkpoint.restore(second, like=state)
for shard in again["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, 2 * whole[shard.index])
print("done", flush=True)
"""


def run(count, arguments):
    """What the processes of a job print; `arguments` are a script and its arguments, by the number of the process."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment |= {"NPROC": "32", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen([sys.executable, "-c", *map(str, arguments(i))], env=environment, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for i in range(count)
    ]  # fmt: skip
    try:
        told = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, "\n".join(told)
    return told


def test_one_process_to_two_and_back(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    whole = np.arange(512 * 256, dtype="float32").reshape(512, 256)
    w = jax.device_put(whole, NamedSharding(mesh(2, 4), P("a", "b")))
    checkpoint.save(first, {"w": w, "b": jnp.arange(8.0), "step": 5})
    address = f"127.0.0.1:{free_port()}"
    for text in run(2, lambda number: [SCRIPT, first, second, address, number]):
        read, needed, chunks = (int(text.split(f"{word} ")[1].split()[0]) for word in ("read", "needed", "chunks"))
        assert chunks <= 1.1 * needed
        assert read < 0.6 * whole.nbytes, "each process reads its half"
    assert checkpoint.steps(second) == (7, 8)
    back = checkpoint.restore(second, mesh(2, 2, names="yx"))
    same(back["w"], 2 * whole)
    assert back["w"].sharding.shard_shape(whole.shape) == (128, 256)
    same(back["key"], jax.random.key(3))
    assert checkpoint.inspect(second).contents.processes == 2


FULL = """
import os, resource, sys, time
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

folder, address, count, number, full = *sys.argv[1:3], *map(int, sys.argv[3:6])
jax.config.update("jax_num_cpu_devices", 2)
bind = {"coordinator_bind_address": address} if number == 0 else {}
jax.distributed.initialize(address, count, number, **bind)
from shardfn import checkpoint

rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
make = lambda step: {
    "w": jax.make_array_from_callback(
        (64 * count, 2048), rows, lambda at: np.random.default_rng(step).normal(size=(32, 2048)).astype("float32")),
    "step": step,
}
checkpoint.save(folder, make(1), step=1)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
if number == full:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
for background in (False, True):
    began = time.monotonic()
    try:
        checkpoint.save(folder, make(2), step=2, background=background).wait()
    except checkpoint.CheckpointFileError as error:
        assert "is full" in str(error) and f"process_{full}" in str(error), error
        print("told in", time.monotonic() - began, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert checkpoint.steps(folder) == (1,), checkpoint.steps(folder)
checkpoint.save(folder, make(3), step=3)
assert checkpoint.steps(folder) == (1, 3) and checkpoint.restore(folder, only="step")["step"] == 3
print("done", flush=True)
"""


@pytest.mark.parametrize(("count", "full"), [(2, 0), (2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_for_one_process_ends_the_save_of_all(tmp_path, count, full):
    address = f"127.0.0.1:{free_port()}"
    for text in run(count, lambda number: [FULL, tmp_path, address, count, number, full]):
        waits = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("told in")]
        assert len(waits) == 2 and max(waits) < 30, text

"""Training steps and pipelines as the TPU's compiler makes them, without a TPU."""

import importlib.util
import json
import subprocess
import sys

import pytest

from shardfn.compiled import targets
from shardfn.cost.devices.hardware import resolve
from shardfn.runtime import verify

RUN = """
import json, re, sys
import jax, jax.numpy as jnp, optax
from jax.experimental import topologies
from shardfn import train
from shardfn.compiled import executable
from shardfn.train.pipelines.deadlock import waiting

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)

def loss(params, x, y):
    for w in params["layers"]:
        x = jnp.tanh(x @ w["up"] + w["b"]) @ w["down"]
    return jnp.mean((x - y) ** 2)

params = {"layers": [{"up": shape(256, 512), "b": shape(512), "down": shape(512, 256)}] * 4}
x, found = shape(64, 256), {}
for name, plan in (("plain", {}), ("tensor", {"*/up": (1, 2), "*/down": (2, 1)})):
    stages = {f"layers/{i}": i for i in range(4)}
    pipe = train.pipeline(loss, 4, stage_config=stages, device=devices, parameter_plan=plan)
    text = jax.jit(jax.value_and_grad(pipe)).lower(pipe.pack(params, x, x), x, x).compile().as_text()
    pairs = re.findall(r"collective-permute.*?source_target_pairs=\\{(\\{.*?\\})\\}", text)
    steps = {int(b) // 2 - int(a) // 2 for one in pairs for a, b in re.findall(r"(\\d+),(\\d+)", one)}
    found[name] = [sorted({c.kind for c in executable.collectives(text)}), sorted(steps), len(waiting(text, 2))]

optimizer = optax.adam(1e-2)
state = jax.eval_shape(lambda p: train.TrainState(p, optimizer.init(p), jnp.int32(0)), params)
for kind in (None, "pinned_host"):
    step = train.step(loss, optimizer, mode="data_parallel", device=devices, opt_state_memory_kind=kind)
    memory = step.lower(state, x, x).compile().memory_analysis()
    found[str(kind)] = [memory.argument_size_in_bytes, memory.host_argument_size_in_bytes]
for again in (False, True):
    step = train.step(loss, optimizer, mode="data_parallel", device=devices, parallel_optimizer_comm_recompute=again,
                      parallel_optimizer_config={"optimizer_level": "level3"})
    made = executable.read(step.lower(state, x, x).compile())
    found[f"gathers {again}"] = sum(c.kind == "all-gather" for c in made.collectives)
print(json.dumps(found))
"""


@pytest.mark.tpu
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_as_a_tpu_has_it():
    env = verify._environment(targets.target(resolve("tpu-v5e:2x4")))
    done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["plain"] == [["all-reduce", "collective-permute"], [-1, 1], 0]
    assert found["tensor"] == [["all-gather", "all-reduce", "collective-permute"], [-1, 1], 0]
    parameters = 4 * 4 * (2 * 256 * 512 + 512)
    on_host = found["pinned_host"][1]
    assert found["None"][1] == 0 and on_host == pytest.approx(2 * parameters, rel=0.01)
    assert found["None"][0] - found["pinned_host"][0] == pytest.approx(2 * parameters, rel=0.01)
    assert found["gathers True"] > found["gathers False"] > 0

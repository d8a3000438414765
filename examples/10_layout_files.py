"""Layout files: save a plan and use it again, write a file by hand, check a file, use a recipe."""

import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import shardfn
from shardfn import plan, shard, tag
from shardfn.layoutfile.files import layout_shardings, read_layout
from shardfn.runtime.layout_check import check_layout

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


def loss(params, x):
    hidden = tag(jax.nn.relu(x @ params["up"]), "hidden")
    return jnp.mean(jnp.square(hidden @ params["down"]))


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


keys = jax.random.split(jax.random.key(0), 3)
params = {"up": jax.random.normal(keys[0], (64, 256)) / 8, "down": jax.random.normal(keys[1], (256, 64)) / 16}
x = jax.random.normal(keys[2], (32, 64))
new, value = step(params, x)

with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "step.toml"
    made = plan(step, params, x, level=2)
    made.save(file)
    print(file.read_text().split("[[sources]]")[0])
    assert shardfn.load_layout(file) == made
    got, got_value = shard(step, layout=file)(params, x)
    np.testing.assert_allclose(got["up"], new["up"], rtol=1e-4, atol=1e-5)

    # A file by hand shards the batch over data, and hidden dims over model. Its last rule matches the tag.
    file.write_text("""
format = "shardfn-layout"
version = 2
batch = ["data"]

[mesh]
data = "left"
model = 4

[arguments]
"*/up" = [1, "model"]
"*/down" = ["model", 1]

[activations]
hidden = ["data", "model"]
""")
    by_hand = shard(step, layout=file)
    np.testing.assert_allclose(by_hand(params, x)[1], got_value, rtol=1e-5)
    made = by_hand.plan(params, x)
    for d in made.inputs:
        print(f"{d.path:12} {d.strategy!s:8} {d.source}")
    assert (made.axes, made.inputs[1].strategy) == ((("data", 2), ("model", 4)), (1, 4))

    # The same file gives the shardings of arrays alone, on other devices.
    sharded = jax.device_put(params, layout_shardings(file, params, jax.devices()[:4], root="params"))
    assert sharded["up"].sharding.shard_shape((64, 256)) == (64, 64)

    # A check reports everything that does not fit, and runs nothing.
    other = {"up": jnp.ones((64, 254)), "down": jnp.ones((256, 64)), "gate": jnp.ones((64, 256))}
    problems = check_layout(file, {"params": other}, device="cpu:8")
    print(*problems, sep="\n")
    assert len(problems) == 2

# A recipe matches the names that Hugging Face gives the parameters.
weights = {"model.embed_tokens.weight": jax.ShapeDtypeStruct((32000, 4096), "bfloat16")}
for name in ("q", "k", "v", "o"):
    weights[f"model.layers.0.self_attn.{name}_proj.weight"] = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
for name, shape in (("gate", (11008, 4096)), ("up", (11008, 4096)), ("down", (4096, 11008))):
    weights[f"model.layers.0.mlp.{name}_proj.weight"] = jax.ShapeDtypeStruct(shape, "bfloat16")
for path, sharding in layout_shardings(read_layout("llama/fsdp-tp").with_mesh(model=8), weights, 256).items():
    print(f"{path:40} {sharding.spec!s:32} {sharding.shard_shape(weights[path].shape)}")

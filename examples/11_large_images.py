"""Large images: windowed reads, convolutions with halo exchange, and a training loop that resumes."""

import json
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardfn import data, halo, shard
from shardfn.mindspore import Layout

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

folder = pathlib.Path(tempfile.mkdtemp())
random = np.random.default_rng(0)

# An image in a file. A memmap, a Zarr array or a TIFF (tifffile) is read in windows; no process loads all of it.
np.save(folder / "picture.npy", random.integers(0, 255, (2048, 3072, 3)).astype("uint8"))
picture = np.load(folder / "picture.npy", mmap_mode="r")
print(f"picture {picture.shape}, {picture.nbytes:,} bytes; rows sharded 2 ways, columns 4 ways:")
for read in data.reads(picture, (2, 4, 1)):
    rows, columns, _ = read.window
    print(f"  device {read.devices[0]} reads rows {rows}, columns {columns}: {read.bytes:,} bytes")
    assert read.bytes == picture.nbytes // 8
on_devices = data.read(picture, (2, 4, 1))
assert on_devices.sharding.shard_shape(on_devices.shape) == (1024, 768, 3)
np.testing.assert_array_equal(on_devices, picture)

# Images and masks in files, with sharded rows and columns. The network's windows reach into neighbouring shards.
shape = (12, 64, 128)
np.save(folder / "pictures.npy", random.normal(size=(*shape, 3)).astype("float32"))
np.save(folder / "masks.npy", (random.random(shape) < 0.5).astype("float32"))
pictures, masks = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("pictures", "masks"))
mesh = Layout((2, 4), ("row", "column"))
image_layout, mask_layout = mesh("None", "row", "column", "None"), mesh("None", "row", "column")
loader = data.load((pictures, masks), (image_layout, mask_layout), batch_size=2, shuffle=True, epochs=2)
print(loader)


def sharded_conv(x, kernel):
    return halo.conv(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), layout=image_layout)


def uncut(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def step_with(conv):
    def loss(params, image, mask):
        hidden = jax.nn.relu(conv(image, params["in"]))
        return jnp.mean((conv(hidden, params["out"])[..., 0] - mask) ** 2)

    def step(params, image, mask):
        value, grads = jax.value_and_grad(loss)(params, image, mask)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


sharded_step = shard(step_with(sharded_conv), in_strategy=(PartitionSpec(), image_layout, mask_layout))


def start():
    return {"in": jnp.full((5, 5, 3, 4), 0.02), "out": jnp.full((3, 3, 4, 1), 0.05)}


def train(step, params, batches, steps):
    losses = []
    for image, mask in batches:
        params, value = step(params, image, mask)
        losses.append(float(value))
        if len(losses) == steps:
            break
    return params, losses


# Stopped after 5 steps: the place in the data is saved beside the parameters, as JSON.
batches = iter(loader)
params, before = train(sharded_step, start(), batches, 5)
np.savez(folder / "params.npz", **params)
(folder / "data.json").write_text(json.dumps(batches.get_state()))

# Started again, perhaps with another number of processes: the batches are those that would have come.
batches = iter(loader)
batches.set_state(json.loads((folder / "data.json").read_text()))
params, after = train(sharded_step, dict(np.load(folder / "params.npz")), batches, None)

_, plain = train(jax.jit(step_with(uncut)), start(), data.load((pictures, masks), "full_batch", batch_size=2, shuffle=True,
                                                              epochs=2, device=jax.devices()[:1]), None)  # fmt: skip
for i, (a, b) in enumerate(zip(before + after, plain, strict=True)):
    print(f"step {i:2}  sharded {a:.6f}  unsharded, without a stop {b:.6f}{'   <- started again' if i == 5 else ''}")
np.testing.assert_allclose(before + after, plain, rtol=1e-4)

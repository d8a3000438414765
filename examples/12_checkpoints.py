"""Train on eight devices, save in the background, go on on two, and take the parameters elsewhere as safetensors."""

import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardfn import AUTO, checkpoint, shard

os.environ["NPROC"] = "32"  # threads for the devices below: JAX before 0.12 can deadlock with fewer
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

optimizer = optax.adam(1e-2)


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


def step(params, opt, x, y):
    grads = jax.grad(loss)(params, x, y)
    updates, opt = optimizer.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


def sharded(devices, up, down):
    return shard(step, (AUTO, AUTO, (2, 1), (2, 1)), device=devices, search_mode="sharding_propagation",
                 parameter_plan={"*up": up, "*down": down})  # fmt: skip


k1, k2, kx, ky = jax.random.split(jax.random.key(0), 4)
params = {"up": jax.random.normal(k1, (256, 1024)) / 16, "down": jax.random.normal(k2, (1024, 128)) / 32}
opt = optimizer.init(params)
x, y = jax.random.normal(kx, (64, 256)), jax.random.normal(ky, (64, 128))

on_eight = sharded(jax.devices(), (1, 4), (4, 1))
plan = on_eight.plan(params, opt, x, y)
with tempfile.TemporaryDirectory() as folder:
    run = pathlib.Path(folder) / "run"
    for i in range(1, 7):
        params, opt = on_eight(params, opt, x, y)
        if i % 2 == 0:  # the two newest steps are kept; the next step is computed while this one is written
            checkpoint.save(run, {"params": params, "opt": opt, "i": i}, plan, step=i, keep=2, background=True)
    print(f"kept: steps {checkpoint.steps(run)}")
    print(checkpoint.inspect(run))

    # The same run on two devices, under other shardings. `like` gives the structure, the plan the shardings.
    on_two = sharded(jax.devices()[:2], (2, 1), (1, 2))
    plan_two = on_two.plan(params, opt, x, y)
    like = {"params": params, "opt": opt, "i": 0}
    print("\nwhat a restore reads, by device:")
    print(checkpoint.reads(run, plan_two, like=like, step=4))
    state = checkpoint.restore(run, plan_two, like=like, step=4)
    two_params, two_opt = state["params"], state["opt"]
    assert two_params["up"].sharding.shard_shape((256, 1024)) == (128, 1024)
    for _ in range(state["i"], 6):
        two_params, two_opt = on_two(two_params, two_opt, x, y)
    for name in params:
        np.testing.assert_allclose(two_params[name], params[name], rtol=1e-4, atol=1e-6)
    print("\nstep 6 on two devices equals step 6 on eight")

    # Without devices: copy it for another mesh, for one device, and as safetensors in half precision.
    layout = pathlib.Path(folder) / "layout.toml"
    layout.write_text('format = "shardfn-layout"\nversion = 2\nothers = "replicated"\n\n[mesh]\ndata = 16\nmodel = 4\n\n'
                      '[arguments]\n"*up" = ["data", "model"]\n"*down" = ["model", "data"]\n')  # fmt: skip
    print(checkpoint.relayout(run, pathlib.Path(folder) / "pod", layout, memory="64MiB"))
    print(checkpoint.merge(run, pathlib.Path(folder) / "one"))
    (file,) = checkpoint.export_safetensors(run, pathlib.Path(folder) / "model.safetensors", only="params/*",
                                            name_map={"params": "model"}, dtype=jnp.bfloat16)  # fmt: skip
    print(f"{file.name}: {file.stat().st_size:,} B")

    # A damaged file is detected and named, and the previous step is complete.
    file = run / "6" / "state" / "_METADATA"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    try:
        checkpoint.restore(run, jax.devices()[0])
        raise SystemExit("a changed bit went unseen")
    except checkpoint.CheckpointFileError as error:
        print(f"\n{str(error).replace(folder, '')}")
    assert checkpoint.restore(run, jax.devices()[0], step=4)["i"] == 4

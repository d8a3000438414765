"""Which mesh axes optimizer parallel shards over, with a number of shards."""

import jax
import jax.numpy as jnp
import optax
import pytest

from shardfn import train


@pytest.mark.parametrize(("devices", "shards"), [(4, 2), (8, 4), (8, 2)])
def test_shards_are_on_neighbours_and_replicas_across_groups(devices, shards):
    config = {"optimizer_level": "level3", "parallel_optimizer_threshold": 0, "optimizer_weight_shard_size": shards}
    step = train.step(
        lambda params, x: jnp.mean((x @ params["w"]) ** 2), optax.sgd(0.1), mode="data_parallel",
        parallel_optimizer_config=config, device=jax.devices()[:devices],
    )  # fmt: skip
    state = step.init({"w": jnp.ones((16, 8))})
    held = [
        shard.index[0].indices(16)[0]
        for shard in sorted(state.params["w"].addressable_shards, key=lambda s: s.device.id)
    ]
    assert held == [16 // shards * (i % shards) for i in range(devices)]
    state, loss = step(state, jnp.ones((8, 16)))
    assert loss == 256

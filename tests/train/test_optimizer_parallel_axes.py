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


LEVEL = "optimizer_level='level{}' shards it"
SMALL = "mode='semi_auto_parallel': no entry in parameter_plan; smaller than parallel_optimizer_threshold=1 (kB)"
NO_ENTRY = "mode='semi_auto_parallel': no entry in parameter_plan"
TENSOR = {"parameter_plan": {"up": (1, 4), "down": (4, 1)}, "in_strategy": ((2, 1),)}


@pytest.mark.parametrize(
    ("level", "options", "reasons"),
    [
        (3, {"mode": "data_parallel"}, {"up": LEVEL.format(3), "mu/up": LEVEL.format(3)}),
        (3, {}, {"up": LEVEL.format(3), "bias": SMALL, "mu/bias": SMALL.replace(NO_ENTRY, "as `state/params/bias`")}),
        (1, {}, {"up": NO_ENTRY, "mu/up": LEVEL.format(1), "nu/up": LEVEL.format(1)}),
        (1, TENSOR, {"up": "parameter_plan['up']", "bias": NO_ENTRY,
                     "mu/up": "as `state/params/up`, and optimizer_level='level1' shards it further"}),
        (None, TENSOR, {"up": "parameter_plan['up']", "bias": NO_ENTRY, "mu/down": "as `state/params/down`"}),
    ],
)  # fmt: skip
def test_every_array_of_a_step_says_why_it_is_sharded_as_it_is(level, options, reasons):
    def loss(params, x):
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] + params["bias"]) ** 2)

    if level:
        config = {"optimizer_level": f"level{level}", "parallel_optimizer_threshold": 1}
        options = {"parallel_optimizer_config": config, **options}
    params = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64)), "bias": jnp.ones(64)}
    step = train.step(loss, optax.adam(1e-3), **{"mode": "semi_auto_parallel", **options})
    plan = step.plan(step.init(params, x := jnp.ones((32, 64))), x)
    for path, reason in reasons.items():
        assert plan.decision(f"state/{'opt_state/0' if '/' in path else 'params'}/{path}").reason == reason

"""What XLA shards inside a `shard_map` over the axes that are not manual: predicted as compiled."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardfn
import shardfn.mindspore as ms
from shardfn import train

W, V, X = jnp.full((64, 256), 0.1), jnp.full((256, 64), 0.1), jnp.ones((128, 64))
FLOPS = 2 * 128 * 64 * 256
"""Of one matmul of the whole batch."""


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def compare(plan):
    """The collectives by kind and the matmul work, predicted and compiled, of a plan without diagnostics."""
    assert not plan.diagnostics
    found = plan.verify().to_dict()["compiled"]
    sent = [
        {kind: row[which]["bytes_sent"] for kind, row in found["kinds"].items()} for which in ("predicted", "compiled")
    ]
    assert sent[0] == sent[1]
    work = found["matmul_flops"]
    assert work["predicted"] == work["compiled"]
    return sent[0], work["compiled"]


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_tensor_parallel_step_of_micro_batches(micro_batches):
    layout = ms.Layout((2, 4), ("dp", "mp"))
    step = train.step(
        loss, optax.sgd(0.1), mode="semi_auto_parallel", in_strategy=(layout("dp", "None"),) * 2,
        parameter_plan={"w": layout("None", "mp"), "v": layout("mp", "None")}, micro_batches=micro_batches,
    )  # fmt: skip
    state = step.init({"w": W, "v": V}, X, X)
    _, work = compare(step.plan(state, X, X))
    assert work == 5 * FLOPS / 8


def test_shard_map_of_the_users_over_a_part_of_the_mesh():
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)

    def summed(x, w, v):
        return jax.lax.psum(jnp.tanh(x @ w) @ v, "d")

    def function(x, w, v):
        specs = P("d"), P(), P()
        return jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=P(), axis_names={"d"})(x, w, v)

    sent, work = compare(shardfn.plan(function, X, W, V, in_strategy=((2, 1), (1, 4), (4, 1))))
    assert work == 2 * FLOPS / 8 and set(sent) == {"all-reduce"}

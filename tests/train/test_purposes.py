"""A collective that a training step writes itself says what it is for, in reports, comparisons and pictures."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn import train

PARAMS = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
X, Y = jnp.ones((32, 64)), jnp.zeros((32, 64))


def loss(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)


def planned(params=PARAMS, loss=loss, **options):
    step = train.step(loss, optax.adam(1e-3), **{"mode": "data_parallel", **options})
    return step.plan(step.init(params, X, Y), X, Y)


def level(number):
    return {"parallel_optimizer_config": {"optimizer_level": f"level{number}", "parallel_optimizer_threshold": 0}}


GRADIENTS = [("all-reduce", "gradient of state/params/down"), ("all-reduce", "gradient of state/params/up")]
LOSS = [("all-reduce", "mean of the loss")]
GATHERS = [("all-gather", f"gather of state/params/{name} (level3)") for name in ("down", "up")]
SCATTERS = [("reduce-scatter", what) for _, what in GRADIENTS]
FUSED = {"comm_fusion": {"openstate": True, "allreduce": {"mode": "auto"}}}
TENSOR = {"mode": "semi_auto_parallel", "parameter_plan": {"up": (1, 4), "down": (4, 1)}, "cross_batch": True,
          "in_strategy": ((2, 1), (2, 1))}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "purposes"),
    [
        ({}, [*GRADIENTS, *LOSS]),
        (level(3), [*GATHERS, *SCATTERS, *LOSS]),
        ({**level(3), "parallel_optimizer_comm_recompute": True}, [*GATHERS, *GATHERS[:1], *SCATTERS, *LOSS]),
        (FUSED, [("all-reduce", "gradients of state/params/down, state/params/up and 1 more")]),
        ({**level(1), **FUSED}, [("all-gather", "gather of state/params/down, state/params/up after the update"),
                                 ("all-reduce", "gradients of state/params/down, state/params/up and 1 more")]),
        ({**TENSOR, **FUSED}, [("all-reduce", "gradients of state/params/down, state/params/up and 1 more")]),
    ],
)  # fmt: skip
def test_each_collective_of_a_step_says_what_it_is_for(options, purposes):
    plan = planned(**options)
    report = shardfn.explain(plan)
    of_step = [(c.kind, c.purpose) for c in plan.collectives if c.cause == "shard_map"]
    assert sorted(of_step) == sorted(purposes)
    assert "written in a shard_map" not in str(report)
    assert all(what in str(report) for _, what in purposes)
    assert {c["cause"]["purpose"] for c in report.to_dict()["collectives"]} >= {what for _, what in purposes}


def test_auxiliary_outputs_and_arrays_that_the_loss_changes_have_names():
    def with_mean(params, x, y):
        return loss(params, x, y), {"rows": x.sum(1), "scale": jnp.mean(x), "largest": jnp.argmax(x[0]) * 0.5}

    purposes = {c.purpose for c in planned(loss=with_mean, has_aux=True).collectives}
    assert purposes == {what for _, what in (*GRADIENTS, *LOSS)} | {"mean of aux/scale", "mean of aux/largest"}


def test_layers_share_a_row_and_names_are_those_of_the_model():
    def deep(params, x, y):
        for layer in params["blocks"]:
            x = x @ layer["größe{1}"]
        return jnp.mean((x - y) ** 2)

    params = {"blocks": [{"größe{1}": jnp.ones((64, 64))} for _ in range(3)]}
    report = shardfn.explain(planned(params, deep))
    (row,) = [line for line in str(report).splitlines() if "gradient of" in line]
    assert row.endswith("gradient of state/params/blocks/*/größe{1}") and row.split()[1] == "3"


def test_comparison_and_picture_name_it_too():
    plan = planned(**level(3))
    found = shardfn.compare({"level 3": plan})
    assert "all-gather (gather of state/params/" in str(found)
    assert "gather of state/params/up (level3)" in str(plan.draw("time"))


def test_a_pipeline_names_what_it_sends():
    def two(params, x, y):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    pipe = train.pipeline(two, 4, pipeline_stages=2, stage_config={"0": 0, "1": 1})
    report = shardfn.explain(planned([jnp.ones((64, 64)), jnp.ones((64, 64))], pipe))
    assert "activations to the next stage" in str(report) and "written in a shard_map" not in str(report)


def test_collectives_of_the_users_own_shard_map_stay_theirs():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def total(x):
        return jax.shard_map(lambda x: jax.lax.psum(x.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(x)

    report = shardfn.explain(total, X, device=mesh)
    assert "written in a shard_map" in str(report) and "test_purposes.py" in str(report)

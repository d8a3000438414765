"""How matmuls are partitioned, compared with XLA: shardings over one to three axes, used by some or by none."""

import itertools
import math
import random

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardfn
from shardfn import compiled
from shardfn.cost.compute import op_flops
from shardfn.partition.tile_assignment import DeviceGroup


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def mlp(x, w1, w2):
    return jax.nn.relu(x @ w1) @ w2


def step(w1, w2, x):
    loss, slopes = jax.value_and_grad(lambda w1, w2: jnp.mean(mlp(x, w1, w2) ** 2), (0, 1))(w1, w2)
    return w1 - 0.1 * slopes[0], w2 - 0.1 * slopes[1], loss


def heads(q, k):
    return jnp.einsum("bhsd,bhtd->bhst", q, k)


def strategies_of(shape):
    every = itertools.product(*[[n for n in (1, 2, 4, 8) if size % n == 0] for size in shape])
    return [c for c in every if math.prod(c) <= 8]


def drawn(args, count):
    """So many layouts of these arguments, the same each time."""
    chance = random.Random(0)
    return [tuple(chance.choice(strategies_of(a.shape)) for a in args) for _ in range(count)]


MLP = f32(64, 128), f32(128, 256), f32(256, 64)
STEP = f32(64, 256), f32(256, 64), f32(16, 64)
HEADS = f32(4, 8, 16, 32), f32(4, 8, 64, 32)

# function, arguments, layouts
KNOWN = [
    # one operand is sharded along its contracting dim, the other along its own dim, and some devices are unused: the first is gathered
    (jnp.matmul, (f32(64, 256), f32(256, 64)), ((1, 2), (1, 2))),
    (jnp.matmul, (f32(64, 256), f32(256, 64)), ((2, 1), (2, 1))),
    (jnp.matmul, (f32(64, 256), f32(256, 64)), ((1, 2), (1, 4))),  # no such devices: the result is added up
    (mlp, MLP, ((1, 1), (1, 2), (1, 2))),
    (mlp, MLP, ((2, 4), (2, 4), (8, 1))),
    (mlp, MLP, ((1, 4), (2, 2), (8, 1))),
    (mlp, MLP, ((4, 2), (4, 2), (2, 2))),  # an operand goes over to the other's contracted dim
    (step, STEP, ((1, 8), (4, 1), (2, 1))),
    (step, STEP, ((4, 2), (1, 8), (2, 2))),  # sums over two dims of the result, one after the other
    (step, STEP, ((2, 4), (1, 8), (2, 1))),
]


@pytest.mark.parametrize(
    ("function", "args", "layout"),
    [*KNOWN, *((mlp, MLP, c) for c in drawn(MLP, 12)), *((step, STEP, c) for c in drawn(STEP, 8)),
     *((heads, HEADS, c) for c in drawn(HEADS, 8))],
)  # fmt: skip
def test_products_are_done_as_xla_does_them(function, args, layout):
    sharded = shardfn.shard(function, layout)
    plan, real = sharded.plan(*args), compiled.read(sharded.lower(*args).compile())
    sent = [sum(c.total_bytes for c in side) for side in (plan.collectives, real.collectives)]
    assert sent[0] == sent[1]
    partitioned = plan.partitioned
    products = sum(op_flops(partitioned, op) for op in partitioned.graph.ops if op.name == "dot_general")
    assert products == pytest.approx(real.flops, rel=0.02)


# ---- from one layout to another

DEVICES = DeviceGroup({"a": 2, "b": 2, "c": 2})


@st.composite
def layouts(draw, dims=3):
    axes = draw(st.permutations("abc"))[: draw(st.integers(0, 3))]
    at = [draw(st.integers(0, dims - 1)) for _ in axes]
    return tuple(tuple(a for a, d in zip(axes, at, strict=True) if d == dim) for dim in range(dims))


@given(layouts(), layouts())
def test_a_road_leads_there_and_sends_no_more_than_all(before, after):
    here, sent = DEVICES.tile(before), 0.0
    for one in DEVICES.path(here, DEVICES.tile(after)):
        now, then = (1 / DEVICES.count([a for axes in spec for a in axes]) for spec in (here.dims, one.after))
        sent += {"all-gather": then - now, "all-to-all": now, "collective-permute": now, "": 0}[one.kind]
        here = DEVICES.tile(one.after)
    assert here.dims == after
    assert sent <= 2


@pytest.mark.parametrize("seed", range(12))
def test_roads_are_those_of_xla(seed):
    chance = random.Random(seed)
    mesh = jax.make_mesh((2, 2, 2), tuple("abc"), axis_types=(AxisType.Auto,) * 3)

    def one():
        at = [(a, chance.randrange(4)) for a in chance.sample("abc", 3)]
        return tuple(tuple(a for a, d in at if d == dim) for dim in range(3))

    before, after = one(), one()
    here, there = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (before, after))

    def constrained(x):
        return jax.lax.with_sharding_constraint(jnp.sin(jax.lax.with_sharding_constraint(x, there)), there)

    made = jax.jit(constrained, in_shardings=here, out_shardings=there).lower(f32(16, 32, 64)).compile()
    path = DEVICES.path(DEVICES.tile(before), DEVICES.tile(after))
    assert [s.kind for s in path if s.kind] == [c.kind for c in compiled.read(made).collectives]

"""No stage waits for devices of another: what would is laid out otherwise, and what still would is refused."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from shardfn import train
from shardfn.compiled.hlo import in_branches
from shardfn.errors import StrategyError
from shardfn.train.pipelines import tensor_parallel
from shardfn.train.pipelines.deadlock import waiting
from tests.messages import refusal

RUN = """
import jax, jax.numpy as jnp, numpy as np
from shardfn import train

D = 8
rng = np.random.default_rng(0)
draw = lambda *shape: (rng.normal(size=shape) / shape[0] ** 0.5).astype("float32")

def turned(x):  # as rotary positions are
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a - b, a + b], -1)

def block(p, x):
    q, k, v = jnp.split(x @ p["qkv"] + p["b"], 3, -1)
    heads = lambda t: t.reshape(*t.shape[:2], 2, D // 2)
    q, k, v = turned(heads(q)), turned(heads(k)), heads(v)
    seen = jnp.einsum("bqhk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bqhk", q, k)), v)
    x = x + seen.reshape(x.shape) @ p["o"]
    a, b = jnp.split(x @ p["up"], 2, -1)
    return x + (jax.nn.silu(a) * b + p["c"]) @ p["down"]

def loss(params, x, y):
    for p in params["blocks"]:
        x = block(p, x)
    return jnp.mean((x - y) ** 2)

params = {"blocks": [{"qkv": draw(D, 3 * D), "b": draw(3 * D), "o": draw(D, D), "up": draw(D, 4 * D),
                      "c": draw(2 * D), "down": draw(2 * D, D)} for _ in range(2)]}
x, y = draw(8, 4, D), draw(8, 4, D)
plan = {"*/qkv": (1, 2), "*/o": (2, 1), "*/up": (1, 2), "*/down": (2, 1)}
pipe = train.pipeline(loss, 2, stage_config={"blocks/0": 0, "blocks/1": 1}, parameter_plan=plan, device=jax.devices()[:4])
packed = pipe.pack(params, x, y)
value, grads = jax.jit(jax.value_and_grad(pipe))(packed, x, y)
wanted = jax.jit(jax.value_and_grad(loss))(params, x, y)
for a, b in zip(jax.tree.leaves((value, pipe.unpack(grads))), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
print("same")
"""


@pytest.mark.slow
def test_what_is_whole_between_two_cut_products():
    """Biases, a split, heads, rotations: XLA would move their pieces by permutations. In a process of its own, for it hung."""
    done = subprocess.run([sys.executable, "-c", RUN], env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "same", done.stderr[-2000:]


def gated(params, x, y):
    for w in params["blocks"]:
        a, b = jnp.split(x @ w["up"], 2, -1)
        x = x + (a * b) @ w["down"]
    return jnp.mean((x - y) ** 2)


def test_what_still_waits_is_refused(monkeypatch):
    """Where no dim is held, XLA permutes what `split` gives, and the compiled module shows it."""
    monkeypatch.setattr(tensor_parallel, "_RULES", {})
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731
    params = {"blocks": [{"up": shape(8, 32), "down": shape(16, 8)}] * 2}
    plan = {"*/up": (1, 2), "*/down": (2, 1)}
    stages = {"blocks/0": 0, "blocks/1": 1}
    pipe = train.pipeline(gated, 2, stage_config=stages, parameter_plan=plan, device=jax.devices()[:4])
    step = jax.jit(jax.value_and_grad(pipe))
    error = refusal(step.lower, pipe.pack(params, shape(8, 8), shape(8, 8)), shape(8, 8), shape(8, 8))
    place = f"`split` at test_deadlock.py:{gated.__code__.co_firstlineno + 2}, "
    assert type(error) is StrategyError and all(p.where.startswith(place) for p in error.problems)
    assert [p.fix.split(",")[0] for p in error.problems] == [
        f"in parameter_plan leave `blocks/{stage}/up` unsharded" for stage in (0, 1)
    ]


MODULE = """HloModule m, num_partitions=8
%add (a: f32[], b: f32[]) -> f32[] {{
  ROOT %s = f32[] add(%a, %b)
}}
%deep (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} {0}
}}
%here (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %c = f32[8]{{0}} call(%x), to_apply=%deep
}}
%there (x: f32[8]) -> f32[8] {{
  ROOT %x = f32[8]{{0}} parameter(0)
}}
ENTRY %main (p: s32[], x: f32[8]) -> f32[8] {{
  %p = s32[] parameter(0)
  %x = f32[8]{{0}} parameter(1)
  %outside = f32[8]{{0}} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %c = f32[8]{{0}} conditional(%p, %x, %outside), branch_computations={{%there, %here}}
}}
"""
FORMS = [  # an instruction, the groups that are read, whether one crosses stages of four devices
    ("all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add", ((0, 1), (2, 3), (4, 5), (6, 7)), False),
    ("all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}", ((0, 1, 2, 3), (4, 5, 6, 7)), False),
    ("all-to-all(%x), replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}", ((0, 2), (1, 3), (4, 6), (5, 7)), False),
    ("all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add", ((0, 4), (1, 5), (2, 6), (3, 7)), True),
    ("all-reduce(%x), replica_groups=mesh['s'=2,'t'=4] {'t'}, to_apply=%add", ((0, 1, 2, 3), (4, 5, 6, 7)), False),
    ("all-reduce(%x), replica_groups=mesh['s'=2,'t'=4] {'s'}, to_apply=%add", ((0, 4), (1, 5), (2, 6), (3, 7)), True),
    ("all-reduce(%x), replica_groups={}, to_apply=%add", (tuple(range(8)),), True),
    ("collective-permute(%x), source_target_pairs={{0,1},{1,0}}", (tuple(range(8)),), True),
]  # fmt: skip


@pytest.mark.parametrize(("text", "groups", "crosses"), FORMS, ids=lambda v: v[:24] if isinstance(v, str) else "")
def test_groups_in_branches(text, groups, crosses):
    module = MODULE.format(text)
    [found] = in_branches(module)
    assert (found.branch, found.groups) == (1, groups)
    assert bool(waiting(module, 4)) == crosses

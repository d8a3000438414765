"""A mixture of experts with 671 billion parameters: a training step on 2,048 TPU v5p.

The sizes are DeepSeek-V3's: 61 layers with latent attention, the first 3 dense, each other one with 256 experts of which a
token visits 8, and a shared expert. `experts.dispatch` sends tokens by one all-to-all; the mesh of that exchange is given, and
all other shardings are searched. The router is a softmax, and the extra head that predicts a second token is left out.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from examples.gallery import Program, shapes, show, training
from examples.gallery.llama3_8b import rms_norm, rotate
from shardfn import experts


@dataclasses.dataclass(frozen=True)
class Config:
    dense: int = 3
    sparse: int = 58
    width: int = 7168
    heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    head: int = 128
    rope: int = 64
    hidden: int = 18432
    experts: int = 256
    chosen: int = 8
    expert_hidden: int = 2048
    vocab: int = 129280
    context: int = 4096
    batch: int = 4096
    mesh: tuple[int, int] = (8, 256)
    dtype: str = "bfloat16"


TINY = Config(dense=1, sparse=2, width=32, heads=4, q_rank=16, kv_rank=16, head=8, rope=4, hidden=64, experts=8, chosen=2,
              expert_hidden=16, vocab=64, context=8, batch=16, mesh=(2, 4), dtype="float32")  # fmt: skip


def parameters(cfg):
    d, h = cfg.width, cfg.heads
    attention = {
        "norm": (d,), "q_down": (d, cfg.q_rank), "q_norm": (cfg.q_rank,), "q_up": (cfg.q_rank, h, cfg.head + cfg.rope),
        "kv_down": (d, cfg.kv_rank + cfg.rope), "kv_norm": (cfg.kv_rank,), "kv_up": (cfg.kv_rank, h, 2 * cfg.head),
        "out": (h, cfg.head, d), "mlp_norm": (d,),
    }  # fmt: skip

    def mlp(hidden, *lead):
        return {"gate": (*lead, d, hidden), "up": (*lead, d, hidden), "down": (*lead, hidden, d)}

    mixture = {
        "router": (d, cfg.experts),
        "experts": mlp(cfg.expert_hidden, cfg.experts),
        "shared": mlp(cfg.expert_hidden),
    }
    return {
        **shapes(cfg.dtype, {"embed": (cfg.vocab, d), "norm": (d,), "head": (d, cfg.vocab)}),
        "dense": shapes(cfg.dtype, {**attention, "mlp": mlp(cfg.hidden)}, cfg.dense),
        "sparse": shapes(cfg.dtype, {**attention, **mixture}, cfg.sparse),
    }


def attend(x, p, cfg):
    """Latent attention: keys and values are made from `kv_rank` numbers a token, the rotary part is shared by all heads."""
    positions = jnp.arange(x.shape[1])
    y = rms_norm(x, p["norm"])
    q = jnp.einsum("btr,rhe->bthe", rms_norm(y @ p["q_down"], p["q_norm"]), p["q_up"])
    q, q_turned = q[..., : cfg.head], rotate(q[..., cfg.head :], positions)
    latent = y @ p["kv_down"]
    kv = jnp.einsum("btr,rhe->bthe", rms_norm(latent[..., : cfg.kv_rank], p["kv_norm"]), p["kv_up"])
    k, v = kv[..., : cfg.head], kv[..., cfg.head :]
    k_turned = rotate(latent[..., None, cfg.kv_rank :], positions)[:, :, 0]
    scores = jnp.einsum("bthe,bshe->bhts", q, k) + jnp.einsum("bthe,bse->bhts", q_turned, k_turned)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores / math.sqrt(cfg.head + cfg.rope), -1e9), axis=-1)
    return x + jnp.einsum("bhts,bshe,hed->btd", weights, v, p["out"])


def swiglu(x, p):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def mixture(x, p, cfg, layout):
    """The shared expert, and 8 of the others for each token."""
    tokens = x.reshape(-1, cfg.width)
    routing = experts.route(tokens @ p["router"], k=cfg.chosen, capacity_factor=1.25, groups=math.prod(cfg.mesh))
    sent = experts.dispatch(tokens, routing, layout=layout, axes="expert" if layout else None)
    hidden = jax.nn.silu(sent.dot(sent.rows, p["experts"]["gate"])) * sent.dot(sent.rows, p["experts"]["up"])
    routed = experts.combine(sent.dot(hidden, p["experts"]["down"]), sent)
    return swiglu(x, p["shared"]) + routed.reshape(x.shape).astype(x.dtype)


def loss(params, tokens, cfg, layout):
    def dense(x, p):
        x = attend(x, p, cfg)
        return x + swiglu(rms_norm(x, p["mlp_norm"]), p["mlp"]), None

    def sparse(x, p):
        x = attend(x, p, cfg)
        return x + mixture(rms_norm(x, p["mlp_norm"]), p, cfg, layout), None

    x = params["embed"][tokens[:, :-1]]
    x, _ = jax.lax.scan(jax.checkpoint(dense), x, params["dense"])
    x, _ = jax.lax.scan(jax.checkpoint(sparse), x, params["sparse"])
    logits = (rms_norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    device = None if size == "tiny" else "tpu-v5p:8x16x16"
    mesh = AbstractMesh(cfg.mesh, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    layout = NamedSharding(mesh, PartitionSpec(("data", "expert")))
    tokens = jax.ShapeDtypeStruct((cfg.batch, cfg.context + 1), jnp.int32)

    def planned(layout):
        step = functools.partial(loss, cfg=cfg, layout=layout)
        return training(step, parameters(cfg), {"tokens": tokens}, device, level="time")

    return dataclasses.replace(planned(layout), unsharded=planned(None).function)


NOTES = """
The mesh of the exchange is part of the function. The search stores the experts' weights sharded along their hidden dimension, and
the plan reshards those of a layer to one expert a chip before each use.
"""

if __name__ == "__main__":
    show(program)

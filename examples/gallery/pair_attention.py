"""AlphaFold's pair stack: a training step of triangle updates for pairs of 512 residues on 64 TPU v4.

Each of 48 blocks updates the pairs by triangle multiplication, by attention around the starting and the ending residue, and by
a transition (Jumper et al. 2021). Attention has 512^3 scores per head, so there is one protein per 4 chips.
"""

import dataclasses

import jax
import jax.numpy as jnp

from examples.gallery import Program, shapes, show, training


@dataclasses.dataclass(frozen=True)
class Config:
    blocks: int = 48
    width: int = 128
    heads: int = 4
    head: int = 32
    residues: int = 512
    bins: int = 64
    batch: int = 16
    dtype: str = "bfloat16"


TINY = Config(blocks=1, width=16, heads=2, head=8, residues=8, bins=8, batch=8, dtype="float32")


def parameters(cfg):
    d, h = cfg.width, (cfg.heads, cfg.head)
    names = ("left", "left_gate", "right", "right_gate", "gate", "out")
    multiplication = {"norm": (d,), "out_norm": (d,), **{name: (d, d) for name in names}}
    attention = {
        "norm": (d,),
        "bias": (d, cfg.heads),
        "out": (*h, d),
        **{name: (d, *h) for name in ("q", "k", "v", "gate")},
    }
    block = {
        **{"outgoing": multiplication, "incoming": multiplication, "starting": attention, "ending": attention},
        "transition": {"norm": (d,), "up": (d, 4 * d), "down": (4 * d, d)},
    }
    return {**shapes(cfg.dtype, {"bins": (d, cfg.bins)}), "blocks": shapes(cfg.dtype, block, cfg.blocks)}


def norm(z, scale):
    return jax.nn.standardize(z.astype(jnp.float32), epsilon=1e-5).astype(z.dtype) * scale


def multiply(z, p, equation):
    """Each pair (i, j) from the pairs that i and j have with every k."""
    y = norm(z, p["norm"])
    left, right = (jax.nn.sigmoid(y @ p[f"{side}_gate"]) * (y @ p[side]) for side in ("left", "right"))
    z = norm(jnp.einsum(equation, left, right), p["out_norm"])
    return (z @ p["out"]) * jax.nn.sigmoid(y @ p["gate"])


def attend(z, p):
    """Each pair (i, j) attends to the pairs (i, k), with a bias from the pair (j, k)."""
    y = norm(z, p["norm"])
    q, k, v, gate = (jnp.einsum("bijd,dhe->bijhe", y, p[name]) for name in ("q", "k", "v", "gate"))
    scores = jnp.einsum("bijhe,bikhe->bihjk", q, k) / k.shape[-1] ** 0.5
    weights = jax.nn.softmax(scores + jnp.einsum("bjkd,dh->bhjk", y, p["bias"])[:, None], axis=-1)
    y = jnp.einsum("bihjk,bikhe->bijhe", weights, v) * jax.nn.sigmoid(gate)
    return jnp.einsum("bijhe,hed->bijd", y, p["out"])


def block(z, p):
    z = z + multiply(z, p["outgoing"], "bikd,bjkd->bijd")
    z = z + multiply(z, p["incoming"], "bkid,bkjd->bijd")
    z = z + jax.checkpoint(attend)(z, p["starting"])
    z = z + jax.checkpoint(attend)(z.swapaxes(1, 2), p["ending"]).swapaxes(1, 2)
    p = p["transition"]
    return z + jax.nn.relu(norm(z, p["norm"]) @ p["up"]) @ p["down"], None


def loss(params, pairs, distances):
    """Pairs [batch, residues, residues, width], and the bins of their distances [batch, residues, residues]."""
    z, _ = jax.lax.scan(jax.checkpoint(block), pairs, params["blocks"])
    logits = ((z + z.swapaxes(1, 2)) @ params["bins"]).astype(jnp.float32)
    wanted = jax.nn.one_hot(distances, logits.shape[-1])
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * wanted, axis=-1))


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    pairs = (cfg.batch, cfg.residues, cfg.residues)
    batch = {
        "pairs": jax.ShapeDtypeStruct((*pairs, cfg.width), cfg.dtype),
        "distances": jax.ShapeDtypeStruct(pairs, jnp.int32),
    }
    return training(loss, parameters(cfg), batch, None if size == "tiny" else "tpu-v4:4x4x4", level="time")


if __name__ == "__main__":
    show(program)

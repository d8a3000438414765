"""haliax: models of named arrays, and mappings from names to mesh axes for parameters and for activations."""

from __future__ import annotations

from typing import Any

import haliax as hax
import jax
import optax
from jax.sharding import AxisType

from benchmarks.peer_steps import Step
from examples.models.gpt2 import ADAMW

LAYOUTS = ("fsdp", "tensor")
MLP_NAMES = {"w1": ("in", "mlp"), "b1": ("mlp",), "w2": ("mlp", "out"), "b2": ("out",)}
EMBED = ("embed",)
ATTENTION_NAMES = {
    **dict.fromkeys(("wq", "wk", "wv"), ("embed", "heads", "head")),
    "wo": ("heads", "head", "embed"),
    **dict.fromkeys(("scale", "bias"), EMBED),
}
FEED_FORWARD_NAMES = {
    **dict.fromkeys(("scale", "bias", "b2"), EMBED),
    "w1": ("embed", "mlp"),
    "b1": ("mlp",),
    "w2": ("mlp", "embed"),
}


def named(values: dict[str, Any], names: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    return {key: hax.named(value, names[key]) for key, value in values.items()}


def named_gpt(params: dict[str, Any]) -> dict[str, Any]:
    names = {"tokens": ("vocab", "embed"), "positions": ("length", "embed"), "scale": EMBED, "bias": EMBED}
    blocks = [
        {"attention": named(b["attention"], ATTENTION_NAMES), "mlp": named(b["mlp"], FEED_FORWARD_NAMES)}
        for b in params["blocks"]
    ]
    return {**named({k: v for k, v in params.items() if k != "blocks"}, names), "blocks": blocks}


def mlp_loss(p, x, y):
    # model: mlp
    h = hax.nn.gelu(hax.dot(x, p["w1"], axis="in") + p["b1"])
    out = hax.auto_sharded(hax.dot(h, p["w2"], axis="mlp") + p["b2"])
    return hax.mean((out - y) ** 2).scalar()
    # end


# model: gpt2
def layer_norm(x, scale, bias):
    mean = hax.mean(x, "embed")
    variance = hax.mean((x - mean) ** 2, "embed")
    return (x - mean) * hax.rsqrt(variance + 1e-5) * scale + bias


def block(p, x):
    a, f = p["attention"], p["mlp"]
    y = layer_norm(x, a["scale"], a["bias"])
    q, k, v = (hax.dot(y, a[name], axis="embed") for name in ("wq", "wk", "wv"))
    k, v = (part.rename({"length": "seen"}) for part in (k, v))
    scores = hax.dot(q, k, axis="head") / q.resolve_axis("head").size ** 0.5
    length, seen = scores.resolve_axis("length"), scores.resolve_axis("seen")
    mask = hax.arange(length).broadcast_axis(seen) >= hax.arange(seen)
    weights = hax.nn.softmax(hax.where(mask, scores, -1e9), axis="seen")
    x = hax.auto_sharded(x + hax.dot(hax.dot(weights, v, axis="seen"), a["wo"], axis=("heads", "head")))
    h = hax.nn.gelu(hax.dot(layer_norm(x, f["scale"], f["bias"]), f["w1"], axis="embed") + f["b1"])
    return hax.auto_sharded(x + hax.dot(h, f["w2"], axis="mlp") + f["b2"])


def gpt_loss(p, tokens, labels):
    x = p["tokens"].take("vocab", tokens) + p["positions"]
    x = hax.auto_sharded(x)
    for one in p["blocks"]:
        x = block(one, x)
    logits = hax.dot(layer_norm(x, p["scale"], p["bias"]), p["tokens"], axis="embed")
    target = hax.nn.one_hot(labels, logits.resolve_axis("vocab"))
    return hax.nn.cross_entropy_loss(logits, "vocab", target).scalar()


# end


def steps(program: str, state: tuple, batch: tuple):
    """A step of this library's model, its state and its batch, as named arrays."""
    if program == "mlp":
        x, y = batch

        def step(params, x, y):
            value, grads = jax.value_and_grad(mlp_loss)(params, x, y)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return step, (named(state[0], MLP_NAMES),), (hax.named(x, ("batch", "in")), hax.named(y, ("batch", "out")))

    def step(params, state, tokens, labels):
        value, grads = jax.value_and_grad(gpt_loss)(params, tokens, labels)
        updates, state = ADAMW.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = named_gpt(state[0])
    rows = tuple(hax.named(part, ("batch", "length")) for part in (batch[0][:, :-1], batch[0][:, 1:]))
    return step, (params, ADAMW.init(params)), rows


def make(program: str, layout: str, step: Any, state: tuple, batch: tuple) -> Step:
    step, state, batch = steps(program, state, batch)
    if layout == "fsdp":
        # sharding: fsdp
        mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
        of_params, of_activations = {"embed": "data", "in": "data", "out": "data"}, {"batch": "data"}
        # end
    else:
        # sharding: tensor
        mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
        of_params = {"heads": "model", "mlp": "model"}
        of_activations = {"batch": "data", **of_params}
        # end
    # sharding: fsdp; tensor
    jitted = hax.named_jit(
        step,
        out_axis_resources=of_params,
        axis_resources=of_activations,
        donate_args=(*(True for _ in state), *(False for _ in batch)),
    )
    # end

    def call(*args):
        with hax.set_mesh(mesh):
            return jitted(*args)

    def lower(*args):
        with hax.set_mesh(mesh):
            return jitted.lower(*args)

    with hax.set_mesh(mesh):
        return Step(call, lower, hax.shard(state, of_params), hax.shard(batch, of_activations))

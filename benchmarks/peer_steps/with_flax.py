"""Flax Linen: modules that name the dimensions of their parameters and activations, and rules from names to mesh axes."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.peer_steps import Step, over_rows
from examples.models.attention import attend, layer_norm
from examples.models.gpt2 import ADAMW

LAYOUTS = ("fsdp", "tensor")


def named(value: Any, *names: str | None) -> Any:
    """The initialiser of a parameter whose value is known: each library starts from the same numbers."""
    return nn.with_logical_partitioning(lambda key: value, names)


class Mlp(nn.Module):
    """`examples.models.mlp`."""

    start: Any

    @nn.compact
    def __call__(self, x):
        start = self.start
        # model: mlp
        w1 = self.param("w1", named(start["w1"], "embed", "mlp"))
        b1 = self.param("b1", named(start["b1"], "mlp"))
        w2 = self.param("w2", named(start["w2"], "mlp", "embed"))
        b2 = self.param("b2", named(start["b2"], "embed"))
        h = nn.with_logical_constraint(jax.nn.gelu(x @ w1 + b1), ("batch", "mlp"))
        y = h @ w2 + b2
        return nn.with_logical_constraint(y, ("batch", "embed"))
        # end


class Block(nn.Module):
    """One layer of `examples.models.gpt2`."""

    start: Any

    @nn.compact
    def __call__(self, x):
        start = {**self.start["attention"], **{f"mlp_{name}": value for name, value in self.start["mlp"].items()}}
        # model: gpt2
        names = {
            **dict.fromkeys(("wq", "wk", "wv"), ("embed", "heads", "head")),
            "wo": ("heads", "head", "embed"),
            **dict.fromkeys(("scale", "bias", "mlp_scale", "mlp_bias", "mlp_b2"), ("embed",)),
            "mlp_w1": ("embed", "mlp"),
            "mlp_b1": ("mlp",),
            "mlp_w2": ("mlp", "embed"),
        }
        p = {name: self.param(name, named(start[name], *dims)) for name, dims in names.items()}
        y = layer_norm(x, p["scale"], p["bias"])
        q, k, v = (jnp.einsum("btm,mhd->bthd", y, p[name]) for name in ("wq", "wk", "wv"))
        q, k, v = nn.with_logical_constraint((q, k, v), ("batch", "length", "heads", "head"))
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        x = x + jnp.einsum("bthd,hdm->btm", attend(q, k, v, mask), p["wo"])
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        h = jax.nn.gelu(layer_norm(x, p["mlp_scale"], p["mlp_bias"]) @ p["mlp_w1"] + p["mlp_b1"])
        h = nn.with_logical_constraint(h, ("batch", "length", "mlp"))
        return nn.with_logical_constraint(x + h @ p["mlp_w2"] + p["mlp_b2"], ("batch", "length", "embed"))
        # end


class Gpt(nn.Module):
    """`examples.models.gpt2`, logits of tokens [batch, length]."""

    start: Any

    @nn.compact
    def __call__(self, tokens):
        start = self.start
        # model: gpt2
        table = self.param("tokens", named(start["tokens"], "vocab", "embed"))
        positions = self.param("positions", named(start["positions"], None, "embed"))
        scale, bias = (self.param(name, named(start[name], "embed")) for name in ("scale", "bias"))
        x = table[tokens] + positions[: tokens.shape[1]]
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        for one in start["blocks"]:
            x = Block(one)(x)
        return nn.with_logical_constraint(layer_norm(x, scale, bias) @ table.T, ("batch", "length", "vocab"))
        # end


def steps(program: str, start: Any):
    """A state, made inside `jit`, and a training step of it."""
    model = (Mlp if program == "mlp" else Gpt)(jax.tree.map(jnp.asarray, start))
    if program == "mlp":

        def init(x, y):
            return (model.init(jax.random.key(0), x),)

        def step(params, x, y):
            value, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, x) - y) ** 2))(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return init, step

    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def init(tokens):
        params = model.init(jax.random.key(0), tokens[:, :-1])
        return params, ADAMW.init(params)

    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = ADAMW.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return init, step


def make(program: str, layout: str, step: Any, state: tuple, batch: tuple) -> Step:
    init, step = steps(program, state[0])
    if layout == "fsdp":
        # sharding: fsdp
        mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
        rules = (("batch", "data"), ("embed", "data"))
        # end
    else:
        # sharding: tensor
        mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
        rules = (("batch", "data"), ("heads", "model"), ("mlp", "model"))
        # end
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        # sharding: fsdp; tensor
        names = nn.get_partition_spec(jax.eval_shape(init, *batch))
        of_state = nn.logical_to_mesh_sharding(names, mesh, rules)
        rows, loss = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        jitted = jax.jit(
            step,
            in_shardings=(*of_state, *(rows for _ in batch)),
            out_shardings=(*of_state, loss),
            donate_argnums=tuple(range(len(of_state))),
        )
        # end
        placed = jax.jit(init, out_shardings=of_state)(*batch)

    def call(*args):
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            return jitted(*args)

    def lower(*args):
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            return jitted.lower(*args)

    return Step(call, lower, placed, over_rows(mesh, batch))

"""Small models whose parameters have the names and shapes of well-known implementations: what the recipes of `layouts/` are for.

Parameters are flat dicts, as the state dicts of Hugging Face's transformers and of torchvision: a dense `weight` is
[out, in] (GPT-2's is [in, out]), a convolution's [out, in, height, width]. Activations are tagged, for layout files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from examples.models import attention, moe, quick_key
from examples.models.training import cross_entropy, sgd_step
from shardfn import tag

Params = dict[str, jax.Array]


def weights(shapes: Mapping[str, tuple[int, ...]]) -> Params:
    """Random parameters; a norm's `weight` and a running variance are one, biases and running means nought."""
    keys = jax.random.split(quick_key(), len(shapes))
    return {name: _weight(name, shape, key) for (name, shape), key in zip(shapes.items(), keys, strict=True)}


def _weight(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    if len(shape) > 1:
        return 0.1 * jax.random.normal(key, shape)
    return jnp.ones(shape) if name.endswith(("weight", "running_var")) else jnp.zeros(shape)


def dense(p: Params, name: str, x: jax.Array) -> jax.Array:
    """x [..., in] to [..., out]."""
    y = jnp.einsum("...i,oi->...o", x, p[f"{name}.weight"])
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def norm(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Layer norm, or RMS norm where there is no bias."""
    if f"{name}.bias" in p:
        return attention.layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"])
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * p[f"{name}.weight"]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, heads: int, bias: jax.Array | float = 0.0) -> jax.Array:
    """Attention of q [b, t, d] to k and v [b, s, d]; `bias` [heads or 1, t, s] goes to the scores."""
    q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in (q, k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5 + bias
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)
    return out.reshape(*out.shape[:2], -1)


def causal(length: int) -> jax.Array:
    """What keeps a position from seeing later ones."""
    return jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e9)


def norms(*names: str, size: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    """Shapes of norms."""
    return {f"{name}.{part}": (size,) for name in names for part in ("weight", "bias")[: 1 + bias]}


def denses(out: int, into: int, *names: str, bias: bool = True) -> dict[str, tuple[int, ...]]:
    """Shapes of dense layers."""
    found: dict[str, tuple[int, ...]] = {}
    for name in names:
        found |= {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})
    return found


# ---- GPT-2 (Hugging Face)


def gpt2(layers: int = 1, d: int = 64, heads: int = 8, vocab: int = 128, seq: int = 32, batch: int = 16):
    """A training step on (params, tokens)."""
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (vocab, d), "transformer.wpe.weight": (seq, d)}
    for i in range(layers):
        h = f"transformer.h.{i}"
        shapes |= norms(f"{h}.ln_1", f"{h}.ln_2", size=d)
        for name, into, out in (
            ("attn.c_attn", d, 3 * d),
            ("attn.c_proj", d, d),
            ("mlp.c_fc", d, 4 * d),
            ("mlp.c_proj", 4 * d, d),
        ):
            shapes |= {f"{h}.{name}.weight": (into, out), f"{h}.{name}.bias": (out,)}
    shapes |= norms("transformer.ln_f", size=d)

    def conv1d(p: Params, name: str, x: jax.Array) -> jax.Array:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    def loss(p: Params, tokens: jax.Array) -> jax.Array:
        x = tag(p["transformer.wte.weight"][tokens[:, :-1]] + p["transformer.wpe.weight"], "embedding")
        for i in range(layers):
            h = f"transformer.h.{i}"
            q, k, v = jnp.split(conv1d(p, f"{h}.attn.c_attn", norm(p, f"{h}.ln_1", x)), 3, axis=-1)
            x = tag(x + conv1d(p, f"{h}.attn.c_proj", attend(q, k, v, heads, causal(seq))), "block")
            hidden = jax.nn.gelu(conv1d(p, f"{h}.mlp.c_fc", norm(p, f"{h}.ln_2", x)))
            x = tag(x + conv1d(p, f"{h}.mlp.c_proj", hidden), "block")
        return cross_entropy(norm(p, "transformer.ln_f", x) @ p["transformer.wte.weight"].T, tokens[:, 1:])

    return step(loss), (weights(shapes), jnp.zeros((batch, seq + 1), jnp.int32))


# ---- Mixtral (Hugging Face; experts stacked, or each on its own as they were stored before)


def mixtral(layers: int = 1, d: int = 64, heads: int = 8, experts: int = 8, f: int = 128, vocab: int = 128, seq: int = 32,
            batch: int = 16, stacked: bool = True):  # fmt: skip
    """A training step on (params, tokens); without rotation of the positions, and with as many key as query heads."""
    shapes = {"model.embed_tokens.weight": (vocab, d), "lm_head.weight": (vocab, d), "model.norm.weight": (d,)}
    for i in range(layers):
        h = f"model.layers.{i}"
        shapes |= norms(f"{h}.input_layernorm", f"{h}.post_attention_layernorm", size=d, bias=False)
        shapes |= denses(d, d, *(f"{h}.self_attn.{n}_proj" for n in "qkvo"), bias=False)
        if stacked:
            shapes |= {f"{h}.mlp.gate.weight": (experts, d), f"{h}.mlp.experts.gate_up_proj": (experts, 2 * f, d),
                       f"{h}.mlp.experts.down_proj": (experts, d, f)}  # fmt: skip
        else:
            m = f"{h}.block_sparse_moe"
            shapes |= denses(experts, d, f"{m}.gate", bias=False)
            for e in range(experts):
                shapes |= denses(f, d, f"{m}.experts.{e}.w1", f"{m}.experts.{e}.w3", bias=False)
                shapes |= denses(d, f, f"{m}.experts.{e}.w2", bias=False)

    def sparse(p: Params, h: str, x: jax.Array) -> jax.Array:
        mixed = moe.route(jax.nn.softmax(dense(p, f"{h}.mlp.gate", x)), capacity=seq // experts * 2)
        sent = tag(jnp.einsum("gtec,gtm->egcm", (mixed > 0).astype(x.dtype), x), "experts")
        gate, up = jnp.split(jnp.einsum("egcm,ehm->egch", sent, p[f"{h}.mlp.experts.gate_up_proj"]), 2, axis=-1)
        out = tag(jnp.einsum("egch,emh->egcm", jax.nn.silu(gate) * up, p[f"{h}.mlp.experts.down_proj"]), "experts")
        return jnp.einsum("gtec,egcm->gtm", mixed, out)

    def all_of_them(p: Params, h: str, x: jax.Array) -> jax.Array:
        share = jax.nn.softmax(dense(p, f"{h}.block_sparse_moe.gate", x))
        best = jax.lax.top_k(share, 2)[0][..., 1:]
        share = jnp.where(share >= best, share, 0.0)
        out = jnp.zeros_like(x)
        for e in range(experts):
            m = f"{h}.block_sparse_moe.experts.{e}"
            out += share[..., e, None] * dense(
                p, f"{m}.w2", jax.nn.silu(dense(p, f"{m}.w1", x)) * dense(p, f"{m}.w3", x)
            )
        return out

    def loss(p: Params, tokens: jax.Array) -> jax.Array:
        x = tag(p["model.embed_tokens.weight"][tokens[:, :-1]], "embedding")
        for i in range(layers):
            h = f"model.layers.{i}"
            y = norm(p, f"{h}.input_layernorm", x)
            q, k, v = (dense(p, f"{h}.self_attn.{n}_proj", y) for n in "qkv")
            x = tag(x + dense(p, f"{h}.self_attn.o_proj", attend(q, k, v, heads, causal(seq))), "block")
            y = norm(p, f"{h}.post_attention_layernorm", x)
            x = tag(x + (sparse if stacked else all_of_them)(p, h, y), "block")
        return cross_entropy(dense(p, "lm_head", norm(p, "model.norm", x)), tokens[:, 1:])

    return step(loss), (weights(shapes), jnp.zeros((batch, seq + 1), jnp.int32))


# ---- T5 (Hugging Face)


def t5(layers: int = 1, d: int = 64, heads: int = 8, f: int = 128, vocab: int = 128, source: int = 32, target: int = 16,
       batch: int = 16):  # fmt: skip
    """A training step on (params, source, target)."""
    shapes = {"shared.weight": (vocab, d), "lm_head.weight": (vocab, d)}
    for stack, parts in (("encoder", 2), ("decoder", 3)):
        shapes |= norms(f"{stack}.final_layer_norm", size=d, bias=False)
        shapes[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (32, heads)
        for i in range(layers):
            for j, kind in enumerate(("SelfAttention", "EncDecAttention")[: parts - 1]):
                layer = f"{stack}.block.{i}.layer.{j}"
                shapes |= denses(d, d, *(f"{layer}.{kind}.{n}" for n in "qkvo"), bias=False)
                shapes |= norms(f"{layer}.layer_norm", size=d, bias=False)
            layer = f"{stack}.block.{i}.layer.{parts - 1}"
            shapes |= denses(f, d, f"{layer}.DenseReluDense.wi", bias=False) | denses(
                d, f, f"{layer}.DenseReluDense.wo", bias=False
            )
            shapes |= norms(f"{layer}.layer_norm", size=d, bias=False)

    def relative(table: jax.Array, length: int) -> jax.Array:
        offsets = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
        return table[jnp.clip(offsets + 16, 0, 31)].transpose(2, 0, 1)

    def attention_of(p: Params, layer: str, kind: str, x: jax.Array, memory: jax.Array | None, bias: Any) -> jax.Array:
        y = norm(p, f"{layer}.layer_norm", x)
        seen = y if memory is None else memory
        q, k, v = (dense(p, f"{layer}.{kind}.{n}", s) for n, s in (("q", y), ("k", seen), ("v", seen)))
        return tag(x + dense(p, f"{layer}.{kind}.o", attend(q, k, v, heads, bias)), "block")

    def feed_forward(p: Params, layer: str, x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(dense(p, f"{layer}.DenseReluDense.wi", norm(p, f"{layer}.layer_norm", x)))
        return tag(x + dense(p, f"{layer}.DenseReluDense.wo", hidden), "block")

    def loss(p: Params, sources: jax.Array, targets: jax.Array) -> jax.Array:
        memory = tag(p["shared.weight"][sources], "embedding")
        table = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        bias = relative(p[table.format("encoder")], source)
        for i in range(layers):
            memory = attention_of(p, f"encoder.block.{i}.layer.0", "SelfAttention", memory, None, bias)
            memory = feed_forward(p, f"encoder.block.{i}.layer.1", memory)
        memory = norm(p, "encoder.final_layer_norm", memory)
        x = tag(p["shared.weight"][targets[:, :-1]], "embedding")
        bias = relative(p[table.format("decoder")], target) + causal(target)
        for i in range(layers):
            x = attention_of(p, f"decoder.block.{i}.layer.0", "SelfAttention", x, None, bias)
            x = attention_of(p, f"decoder.block.{i}.layer.1", "EncDecAttention", x, memory, 0.0)
            x = feed_forward(p, f"decoder.block.{i}.layer.2", x)
        return cross_entropy(dense(p, "lm_head", norm(p, "decoder.final_layer_norm", x)), targets[:, 1:])

    tokens = (jnp.zeros((batch, source), jnp.int32), jnp.zeros((batch, target + 1), jnp.int32))
    return step(loss), (weights(shapes), *tokens)


# ---- ViT (Hugging Face)


def vit(
    layers: int = 1, d: int = 64, heads: int = 8, image: int = 32, patch: int = 8, classes: int = 16, batch: int = 16
):
    """A training step on (params, images, labels); images [batch, channels, height, width]."""
    count = (image // patch) ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "vit.embeddings.cls_token": (1, 1, d),
        "vit.embeddings.position_embeddings": (1, count + 1, d),
        "vit.embeddings.patch_embeddings.projection.weight": (d, 3, patch, patch),
        "vit.embeddings.patch_embeddings.projection.bias": (d,),
    }
    for i in range(layers):
        h = f"vit.encoder.layer.{i}"
        shapes |= denses(
            d, d, *(f"{h}.attention.attention.{n}" for n in ("query", "key", "value")), f"{h}.attention.output.dense"
        )
        shapes |= denses(4 * d, d, f"{h}.intermediate.dense") | denses(d, 4 * d, f"{h}.output.dense")
        shapes |= norms(f"{h}.layernorm_before", f"{h}.layernorm_after", size=d)
    shapes |= norms("vit.layernorm", size=d) | denses(classes, d, "classifier")

    def loss(p: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        e = "vit.embeddings"
        side = image // patch
        cut = (
            images.reshape(batch, 3, side, patch, side, patch)
            .transpose(0, 2, 4, 1, 3, 5)
            .reshape(batch, count, 3, patch, patch)
        )
        x = (
            jnp.einsum("bnchw,dchw->bnd", cut, p[f"{e}.patch_embeddings.projection.weight"])
            + p[f"{e}.patch_embeddings.projection.bias"]
        )
        x = jnp.concatenate([jnp.broadcast_to(p[f"{e}.cls_token"], (batch, 1, d)), x], axis=1)
        x = tag(x + p[f"{e}.position_embeddings"], "embedding")
        for i in range(layers):
            h = f"vit.encoder.layer.{i}"
            y = norm(p, f"{h}.layernorm_before", x)
            q, k, v = (dense(p, f"{h}.attention.attention.{n}", y) for n in ("query", "key", "value"))
            x = tag(x + dense(p, f"{h}.attention.output.dense", attend(q, k, v, heads)), "block")
            hidden = jax.nn.gelu(dense(p, f"{h}.intermediate.dense", norm(p, f"{h}.layernorm_after", x)))
            x = tag(x + dense(p, f"{h}.output.dense", hidden), "block")
        return cross_entropy(dense(p, "classifier", norm(p, "vit.layernorm", x)[:, 0]), labels)

    return step(loss), (weights(shapes), jnp.zeros((batch, 3, image, image)), jnp.zeros(batch, jnp.int32))


# ---- ResNet (torchvision)


def resnet(widths: tuple[int, ...] = (16, 32), image: int = 32, classes: int = 16, batch: int = 16):
    """A training step on (params, images, labels) with basic blocks; images [batch, channels, height, width].

    The running statistics stand among the parameters, as in a state dict; this step leaves them as they are.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def conv_bn(conv: str, bn: str, out: int, into: int, size: int) -> None:
        shapes[f"{conv}.weight"] = (out, into, size, size)
        shapes.update(norms(bn, size=out) | {f"{bn}.running_mean": (out,), f"{bn}.running_var": (out,)})

    conv_bn("conv1", "bn1", widths[0], 3, 7)
    into = widths[0]
    for i, out in enumerate(widths, 1):
        conv_bn(f"layer{i}.0.conv1", f"layer{i}.0.bn1", out, into, 3)
        conv_bn(f"layer{i}.0.conv2", f"layer{i}.0.bn2", out, out, 3)
        if out != into:
            conv_bn(f"layer{i}.0.downsample.0", f"layer{i}.0.downsample.1", out, into, 1)
        into = out
    shapes |= denses(classes, into, "fc")

    def conv(p: Params, name: str, bn: str, x: jax.Array, stride: int = 1) -> jax.Array:
        y = jax.lax.conv_general_dilated(x, p[f"{name}.weight"], (stride, stride), "SAME")
        mean, variance = (f(y, axis=(0, 2, 3), keepdims=True) for f in (jnp.mean, jnp.var))
        scale, bias = (p[f"{bn}.{part}"][:, None, None] for part in ("weight", "bias"))
        return (y - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + bias

    def loss(p: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = tag(jax.nn.relu(conv(p, "conv1", "bn1", images, 2)), "stage")
        for i in range(1, len(widths) + 1):
            b = f"layer{i}.0"
            y = conv(p, f"{b}.conv2", f"{b}.bn2", jax.nn.relu(conv(p, f"{b}.conv1", f"{b}.bn1", x, 1 + (i > 1))))
            if f"{b}.downsample.0.weight" in p:
                x = conv(p, f"{b}.downsample.0", f"{b}.downsample.1", x, 2)
            x = tag(jax.nn.relu(x + y), "stage")
        return cross_entropy(dense(p, "fc", jnp.mean(x, axis=(2, 3))), labels)

    return step(loss), (weights(shapes), jnp.zeros((batch, 3, image, image)), jnp.zeros(batch, jnp.int32))


# ---- DLRM (Meta's)


def dlrm(rows: tuple[int, ...] = (1024, 512, 512), d: int = 16, inputs: int = 16, hidden: int = 32, batch: int = 64):
    """A training step on (params, dense_features, ids, clicked)."""
    pairs = len(rows) * (len(rows) + 1) // 2
    shapes = {f"emb_l.{i}.weight": (n, d) for i, n in enumerate(rows)}
    shapes |= denses(hidden, inputs, "bot_l.0") | denses(d, hidden, "bot_l.2")
    shapes |= denses(hidden, d + pairs, "top_l.0") | denses(1, hidden, "top_l.2")

    def loss(p: Params, features: jax.Array, ids: jax.Array, clicked: jax.Array) -> jax.Array:
        bottom = tag(dense(p, "bot_l.2", jax.nn.relu(dense(p, "bot_l.0", features))), "features")
        found = [tag(p[f"emb_l.{i}.weight"][ids[:, i]], "features") for i in range(len(rows))]
        z = jnp.stack([bottom, *found], axis=1)
        products = jnp.einsum("bid,bjd->bij", z, z)
        upper = jnp.triu_indices(z.shape[1], k=1)
        top = jnp.concatenate([bottom, products[:, *upper]], axis=1)
        logits = dense(p, "top_l.2", jax.nn.relu(dense(p, "top_l.0", top)))[:, 0]
        return jnp.mean(jax.nn.softplus(logits) - clicked * logits)

    batch_of = (jnp.zeros((batch, inputs)), jnp.zeros((batch, len(rows)), jnp.int32), jnp.zeros(batch))
    return step(loss), (weights(shapes), *batch_of)


# ---- a large image


def large_image(height: int = 256, width: int = 256, steps: int = 4):
    """Steps of smoothing and sharpening of one image: (image [height, width, channels], strength) to the image after."""

    def near(x: jax.Array) -> jax.Array:
        p = jnp.pad(x, ((1, 1), (1, 1), (0, 0)))
        return (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]) / 4

    def sharpened(image: jax.Array, strength: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, steps, lambda _, x: x + strength * (x - near(x)), image)

    return sharpened, (jnp.zeros((height, width, 3)), jnp.float32(0.1))


def step(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """One step of gradient descent on (params, *batch): new parameters, and the loss before it."""
    return functools.partial(sgd_step, loss=loss)

"""A diffusion U-Net: a training step of Stable Diffusion's denoiser on 64 H100.

Residual blocks and transformers on four resolutions, connected across by skips; the transformers attend to the image and to the
77 tokens of a text (Rombach et al. 2022). The layers are Flax Linen modules. 0.86 billion parameters predict the noise in latent
images of 64 x 64 x 4.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from examples.gallery import Program, show, training


@dataclasses.dataclass(frozen=True)
class Config:
    widths: tuple[int, ...] = (320, 640, 1280, 1280)
    attended: int = 3
    blocks: int = 2
    heads: int = 8
    groups: int = 32
    size: int = 64
    channels: int = 4
    tokens: int = 77
    text: int = 768
    batch: int = 1024
    dtype: str = "bfloat16"


TINY = Config(
    widths=(8, 16), attended=1, blocks=1, heads=2, groups=4, size=8, tokens=4, text=8, batch=8, dtype="float32"
)


class Residual(nn.Module):
    """Two convolutions, with the time step added between them."""

    cfg: Config
    width: int

    @nn.compact
    def __call__(self, x, time):
        cfg, types = self.cfg, {"dtype": self.cfg.dtype, "param_dtype": self.cfg.dtype}
        y = nn.Conv(self.width, (3, 3), **types)(nn.silu(nn.GroupNorm(cfg.groups, **types)(x)))
        y = y + nn.Dense(self.width, **types)(nn.silu(time))[:, None, None]
        y = nn.Conv(self.width, (3, 3), **types)(nn.silu(nn.GroupNorm(cfg.groups, **types)(y)))
        return y + (x if x.shape == y.shape else nn.Conv(self.width, (1, 1), **types)(x))


class Transformer(nn.Module):
    """Attention to the image, attention to the text, and a gated hidden layer."""

    cfg: Config

    @nn.compact
    def __call__(self, x, text):
        cfg, types = self.cfg, {"dtype": self.cfg.dtype, "param_dtype": self.cfg.dtype}
        width = x.shape[-1]
        y = nn.Dense(width, **types)(nn.GroupNorm(cfg.groups, **types)(x).reshape(len(x), -1, width))
        for other in (None, text):
            attention = nn.MultiHeadDotProductAttention(cfg.heads, **types)
            y = y + attention(nn.LayerNorm(**types)(y), other)
        up, gate = jnp.split(nn.Dense(8 * width, **types)(nn.LayerNorm(**types)(y)), 2, axis=-1)
        y = y + nn.Dense(width, **types)(up * nn.gelu(gate))
        return x + nn.Dense(width, **types)(y).reshape(x.shape)


class UNet(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x, time, text):
        """The noise in x [batch, size, size, channels]; time [batch] is from 0 to 1, text [batch, tokens, text]."""
        cfg, types = self.cfg, {"dtype": self.cfg.dtype, "param_dtype": self.cfg.dtype}
        first = cfg.widths[0]
        angles = 1000 * time[:, None] / 10_000.0 ** (jnp.arange(first // 2) / (first // 2))
        time = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1).astype(cfg.dtype)
        time = nn.Dense(4 * first, **types)(nn.silu(nn.Dense(4 * first, **types)(time)))
        x = nn.Conv(first, (3, 3), **types)(x)
        skips = [x]
        for level, width in enumerate(cfg.widths):
            for _ in range(cfg.blocks):
                x = Residual(cfg, width)(x, time)
                x = Transformer(cfg)(x, text) if level < cfg.attended else x
                skips.append(x)
            if level < len(cfg.widths) - 1:
                x = nn.Conv(width, (3, 3), strides=2, **types)(x)
                skips.append(x)
        x = Residual(cfg, x.shape[-1])(x, time)
        x = Residual(cfg, x.shape[-1])(Transformer(cfg)(x, text), time)
        for level, width in reversed(list(enumerate(cfg.widths))):
            for _ in range(cfg.blocks + 1):
                x = Residual(cfg, width)(jnp.concatenate([x, skips.pop()], axis=-1), time)
                x = Transformer(cfg)(x, text) if level < cfg.attended else x
            if level:
                x = nn.Conv(width, (3, 3), **types)(jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2))
        return nn.Conv(cfg.channels, (3, 3), **types)(nn.silu(nn.GroupNorm(cfg.groups, **types)(x)))


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    model = UNet(cfg)

    def loss(params, latents, noise, times, text):
        level = times[:, None, None, None].astype(latents.dtype)
        found = model.apply({"params": params}, (1 - level) * latents + level * noise, times, text)
        return jnp.mean((found - noise).astype(jnp.float32) ** 2)

    image = jax.ShapeDtypeStruct((cfg.batch, cfg.size, cfg.size, cfg.channels), cfg.dtype)
    batch = {
        "latents": image,
        "noise": image,
        "times": jax.ShapeDtypeStruct((cfg.batch,), jnp.float32),
        "text": jax.ShapeDtypeStruct((cfg.batch, cfg.tokens, cfg.text), cfg.dtype),
    }
    params = jax.eval_shape(model.init, jax.random.key(0), image, batch["times"], batch["text"])["params"]
    return training(loss, params, batch, None if size == "tiny" else "h100:64", level="time", budget="fast")


NOTES = """
The program has tens of thousands of ops, as no loop holds its layers, and a candidate takes seconds to evaluate. The plan is made
with `budget="fast"`. The batch is half of Stable Diffusion's, so that the activations kept for the gradient fit without
`nn.remat`.
"""

if __name__ == "__main__":
    show(program)

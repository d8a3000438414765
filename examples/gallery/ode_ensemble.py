"""Ensemble of chaotic systems: a gradient through 16,384 ODE solves on 16 H100.

Each member is a Lorenz 96 system of 960 variables, solved by 200 steps of Runge and Kutta. A network adds the effect of scales
that are not resolved, and learns it from where the members arrive.
"""

import dataclasses

import jax
import jax.numpy as jnp

from examples.gallery import Program, shapes, show, training


@dataclasses.dataclass(frozen=True)
class Config:
    members: int = 16_384
    variables: int = 960
    hidden: int = 4096
    saved: int = 10
    steps: int = 20


TINY = Config(members=16, variables=16, hidden=32, saved=2, steps=2)


def rate(x, params):
    """Lorenz 96, x [variables], with the network's correction."""
    known = (jnp.roll(x, -1) - jnp.roll(x, 2)) * jnp.roll(x, 1) - x + params["forcing"]
    return known + jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def runge_kutta(x, params, size):
    """One step of the classical method of order 4."""
    k1 = rate(x, params)
    k2 = rate(x + size / 2 * k1, params)
    k3 = rate(x + size / 2 * k2, params)
    k4 = rate(x + size * k3, params)
    return x + size / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def solve(x, params, cfg):
    """The states [saved, variables] of one member; between saved states the gradient recomputes the steps."""

    @jax.checkpoint
    def interval(x, _):
        x, _ = jax.lax.scan(lambda x, _: (runge_kutta(x, params, 0.01), None), x, length=cfg.steps)
        return x, x

    return jax.lax.scan(interval, x, length=cfg.saved)[1]


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()

    def loss(params, start, observed):
        states = jax.vmap(lambda x: solve(x, params, cfg))(start)
        return jnp.mean((states - observed) ** 2)

    k, hidden = cfg.variables, cfg.hidden
    params = shapes(jnp.float32, {"forcing": (k,), "up": (k, hidden), "bias": (hidden,), "down": (hidden, k)})
    batch = shapes(jnp.float32, {"start": (cfg.members, k), "observed": (cfg.members, cfg.saved, k)})
    return training(loss, params, batch, None if size == "tiny" else "h100:16", level="time")


if __name__ == "__main__":
    show(program)

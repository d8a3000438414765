"""Molecules with jraph: a training step of a graph network for catalysts on 16 H100.

A batch has 2,048 structures, each padded to 256 atoms and 8,192 pairs of neighbours, as in Open Catalyst 2020. jraph's
`GraphNetwork` passes messages between neighbours and gathers them into the energy of each structure; `jax.vmap` maps it over the
batch. Eight rounds have weights of their own.
"""

import dataclasses

import jax
import jax.numpy as jnp
import jraph

from examples.gallery import Program, shapes, show, training


@dataclasses.dataclass(frozen=True)
class Config:
    rounds: int = 8
    width: int = 256
    atoms: int = 256
    pairs: int = 8192
    elements: int = 100
    distances: int = 64
    batch: int = 2048
    dtype: str = "bfloat16"


TINY = Config(rounds=2, width=8, atoms=8, pairs=16, elements=8, distances=4, batch=16, dtype="float32")


def parameters(cfg):
    d = cfg.width

    def mlp(inputs):
        return {"up": (inputs * d, d), "bias": (d,), "down": (d, d)}

    rounds = {"edge": mlp(4), "node": mlp(4), "global": mlp(3)}
    rest = {"elements": (cfg.elements, d), "distances": (cfg.distances, d), "energy": (d,)}
    return {**shapes(cfg.dtype, rest), "rounds": shapes(cfg.dtype, rounds, cfg.rounds)}


def update(p):
    """A function of features that jraph gives it, each [items, width]."""
    return lambda *features: jax.nn.silu(jnp.concatenate(features, axis=-1) @ p["up"] + p["bias"]) @ p["down"]


def energy(params, elements, distances, senders, receivers, cfg):
    """The energy of one structure of elements [atoms], and pairs with distances [pairs, distances]."""
    graph = jraph.GraphsTuple(
        nodes=params["elements"][elements], edges=distances @ params["distances"], senders=senders, receivers=receivers,
        globals=jnp.zeros((1, cfg.width), cfg.dtype), n_node=jnp.array([cfg.atoms]), n_edge=jnp.array([cfg.pairs]),
    )  # fmt: skip

    @jax.checkpoint
    def one_round(graph, p):
        new = jraph.GraphNetwork(update(p["edge"]), update(p["node"]), update(p["global"]))(graph)
        parts = {name: getattr(graph, name) + getattr(new, name) for name in ("nodes", "edges", "globals")}
        return graph._replace(**parts), None

    graph, _ = jax.lax.scan(one_round, graph, params["rounds"])
    return graph.globals[0] @ params["energy"]


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()

    def loss(params, wanted, **structures):
        found = jax.vmap(lambda s: energy(params, **s, cfg=cfg))(structures)
        return jnp.mean(jnp.abs(found.astype(jnp.float32) - wanted))

    n = cfg.batch
    batch = {
        "elements": jax.ShapeDtypeStruct((n, cfg.atoms), jnp.int32),
        "distances": jax.ShapeDtypeStruct((n, cfg.pairs, cfg.distances), cfg.dtype),
        "senders": jax.ShapeDtypeStruct((n, cfg.pairs), jnp.int32),
        "receivers": jax.ShapeDtypeStruct((n, cfg.pairs), jnp.int32),
        "wanted": jax.ShapeDtypeStruct((n,), jnp.float32),
    }
    return training(loss, parameters(cfg), batch, None if size == "tiny" else "h100:16", level="time")


NOTES = """
The plan at full size was not compiled: XLA's GPU compiler had not finished after two minutes of CPU time.
"""

if __name__ == "__main__":
    show(program)

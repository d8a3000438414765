"""GraphCast: a training step of a graph neural network for weather on 32 TPU v5e.

A grid of 0.25 degrees is encoded onto an icosahedral mesh, 16 rounds of messages pass along its edges, and the mesh is decoded
onto the grid (Lam et al. 2023). There is no batch: nodes and edges are sharded. Those of the mesh and the encoder are padded to
counts that divide.
"""

import dataclasses

import jax
import jax.numpy as jnp

from examples.gallery import Program, shapes, show, training


@dataclasses.dataclass(frozen=True)
class Config:
    rounds: int = 16
    width: int = 512
    grid: int = 721 * 1440
    mesh: int = 41_472
    encoder_edges: int = 1_618_944
    mesh_edges: int = 327_680
    decoder_edges: int = 3 * 721 * 1440
    features: int = 474
    outputs: int = 227
    edge_features: int = 4
    dtype: str = "bfloat16"


TINY = Config(rounds=2, width=16, grid=32, mesh=16, encoder_edges=64, mesh_edges=32, decoder_edges=64, features=8,
              outputs=8, dtype="float32")  # fmt: skip


def parameters(cfg):
    d = cfg.width

    def mlp(out=d, **ins):
        return {**{name: (size, d) for name, size in ins.items()}, "bias": (d,), "out": (d, out)}

    def messages(edge):
        return {"edge": mlp(edge=edge, sender=d, receiver=d), "node": mlp(node=d, received=d)}

    rest = {
        **{"grid": mlp(node=cfg.features), "mesh": mlp(node=3), "mesh_edges": mlp(edge=cfg.edge_features)},
        **{"encoder": messages(cfg.edge_features), "decoder": messages(cfg.edge_features)},
        "outputs": mlp(cfg.outputs, node=d),
    }
    return {**shapes(cfg.dtype, rest), "rounds": shapes(cfg.dtype, messages(d), cfg.rounds)}


def mlp(p, first):
    """A hidden layer whose matmuls are done; the outputs are standardised."""
    return jax.nn.standardize(jax.nn.silu(first + p["bias"]) @ p["out"], epsilon=1e-5)


@jax.checkpoint
def pass_messages(p, edges, graph, sender_nodes, receiver_nodes):
    """Messages along edges [edges, features], whose ends the graph has, and the updated receiver nodes."""
    (e, n), receivers = (p["edge"], p["node"]), graph["receivers"]
    # a matmul of each node in place of one of each edge, as the first layer is linear
    sent, wanted = (sender_nodes @ e["sender"])[graph["senders"]], (receiver_nodes @ e["receiver"])[receivers]
    messages = mlp(e, edges @ e["edge"] + sent + wanted)
    received = jax.ops.segment_sum(messages, receivers, len(receiver_nodes))
    return messages, receiver_nodes + mlp(n, receiver_nodes @ n["node"] + received @ n["received"])


def loss(params, now, later, positions, encoder, mesh, decoder):
    """The mean squared error of the change from now [grid, features] to later [grid, outputs]."""

    def round_of(carry, p):
        edges, nodes = carry
        messages, nodes = pass_messages(p, edges, mesh, nodes, nodes)
        return (edges + messages, nodes), None

    p = params
    grid, nodes = mlp(p["grid"], now @ p["grid"]["node"]), mlp(p["mesh"], positions @ p["mesh"]["node"])
    edges = mlp(p["mesh_edges"], mesh["edges"] @ p["mesh_edges"]["edge"])
    _, nodes = pass_messages(p["encoder"], encoder["edges"], encoder, grid, nodes)
    (_, nodes), _ = jax.lax.scan(round_of, (edges, nodes), p["rounds"])
    _, grid = pass_messages(p["decoder"], decoder["edges"], decoder, nodes, grid)
    p = p["outputs"]
    change = jax.nn.silu(grid @ p["node"] + p["bias"]) @ p["out"]
    return jnp.mean((now[:, : change.shape[1]] + change - later).astype(jnp.float32) ** 2)


def program(size: str) -> Program:
    cfg = TINY if size == "tiny" else Config()
    array = jax.ShapeDtypeStruct

    def graph(count):
        ends = {name: array((count,), jnp.int32) for name in ("senders", "receivers")}
        return {"edges": array((count, cfg.edge_features), cfg.dtype), **ends}

    graphs = {"encoder": graph(cfg.encoder_edges), "mesh": graph(cfg.mesh_edges), "decoder": graph(cfg.decoder_edges)}
    nodes = {"now": (cfg.grid, cfg.features), "later": (cfg.grid, cfg.outputs), "positions": (cfg.mesh, 3)}
    batch = {**shapes(cfg.dtype, nodes), **graphs}
    return training(loss, parameters(cfg), batch, None if size == "tiny" else "tpu-v5e:4x8", level="time")


if __name__ == "__main__":
    show(program)

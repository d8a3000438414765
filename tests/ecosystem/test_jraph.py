"""jraph: graphs of nodes and edges."""

import jax
import jax.numpy as jnp
import jraph

from tests.ecosystem.rows import Row, check, integers, normal, table


def graph():
    return jraph.GraphsTuple(
        nodes=normal(64, 16), edges=normal(128, 8), senders=integers(64, 128), receivers=integers(64, 128, seed=1),
        n_node=jnp.array([40, 24]), n_edge=jnp.array([80, 48]), globals=normal(2, 4),
    )  # fmt: skip


def convolution():
    layer = jraph.GraphConvolution(lambda nodes: jnp.tanh(nodes))
    return Row(lambda g, w: layer(g._replace(nodes=g.nodes @ w)).nodes, (graph(), normal(16, 32)), batch=())


def attention():
    def run(g, w, a):
        layer = jraph.GAT(
            lambda nodes: nodes @ w, lambda s, r, e: jax.nn.leaky_relu(jnp.concatenate([s, r], -1) @ a), None
        )
        return layer(g).nodes

    return Row(run, (graph()._replace(edges=None, globals=None), normal(16, 32), normal(64, 1)), batch=())


def interaction():
    def run(g, we, wn):
        layer = jraph.InteractionNetwork(
            lambda e, s, r: jnp.tanh(jnp.concatenate([e, s, r], -1) @ we),
            lambda n, r: jnp.tanh(jnp.concatenate([n, r], -1) @ wn),
        )
        return layer(g).nodes

    return Row(run, (graph(), normal(40, 16), normal(32, 16)), batch=())


def segments():
    return Row(lambda x, s: jraph.segment_softmax(x, s, 16), (normal(128), integers(16, 128)), batch=(0, 1))


ROWS = {
    "GraphConvolution": convolution,
    "GAT": attention,
    "InteractionNetwork": interaction,
    "segment_softmax": segments,
}


@table(__name__, ROWS)
def test_jraph_function_under_layout_equals_unsharded(make, layout, known):
    check(make, layout, known)

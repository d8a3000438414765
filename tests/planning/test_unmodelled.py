"""Diagnostics of a plan for what the cost model does not predict."""

import dataclasses

import jax
import jax.numpy as jnp

import shardfn
from shardfn.planning.diagnostics import not_predicted

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)


def test_not_predicted_names_only_ops_without_a_rule():
    """What neighbours exchange for a slice is predicted; of an op that nobody knows it is said that it is not."""
    made = shardfn.plan(lambda x: jnp.roll(x, 3, 0) + x[::-1], X, in_strategy=((8, 1),), device="cpu:8")
    assert made.collectives and not any("not predicted" in finding for finding in made.diagnostics)
    graph = made.partitioned.graph
    ops = tuple(dataclasses.replace(op, name="odd") if op.name == "reverse" else op for op in graph.ops)
    odd = dataclasses.replace(graph, ops=ops)
    (finding,) = not_predicted(odd, dataclasses.replace(made.partitioned, graph=odd))
    assert "odd (" in finding and "are not predicted; fix: check them" in finding

"""What the search's tables charge an op under each of its labels is what the partitioner sends for it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardfn.cost.estimate import collective_s, collectives
from shardfn.ir.model import Graph
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.partition.partitioner import insert_collectives
from shardfn.search.labels import MeshModel, build
from shardfn.search.labels.mesh_model import spec_of_label
from tests.search.problems import S, problem_of

MOST = 60
"""Labels of an op that are partitioned, spread over all of them."""

MAIN = {"dot_general", "reduce", "scatter", "gather", "convolution", "reduce_window", "slice"}


def convolved(x, k):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def kernel_gradient(x, y):
    return jax.vjp(lambda k: convolved(x, k), jnp.zeros((3, 3, 16, 32)))[1](y)[0]


def pooled(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 5, 1, 1), (1, 1, 1, 1), "SAME")


FUNCTIONS = {
    "matmul": (lambda x, y: x @ y, [(256, 512), (512, 384)]),
    "two contracted dimensions": (lambda x, y: jnp.einsum("bsd,bsf->df", x, y), [(32, 64, 256), (32, 64, 512)]),
    "batched matmul": (lambda x, y: jnp.einsum("bik,bkj->bij", x, y), [(32, 64, 128), (32, 128, 256)]),
    "sum over two dimensions": (lambda x: x.sum((0, 1)), [(32, 64, 256)]),
    "sum to a matrix": (lambda x: x.sum(2), [(32, 64, 256)]),
    "rows added": (lambda t, i, u: t.at[i].add(u), [(1024, 256), (32, 64), (32, 64, 256)]),
    "rows read": (lambda t, i: t.at[i].get(mode="clip"), [(1024, 256), (32, 64)]),
    "convolution": (convolved, [(16, 64, 16, 16), (3, 3, 16, 32)]),
    "kernel gradient": (kernel_gradient, [(16, 64, 16, 16), (16, 64, 16, 32)]),
    "pooling": (pooled, [(16, 64, 32, 16)]),
    "slice": (lambda x: x[:, 128:384], [(64, 512)]),
    "cumulative sum": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 64), (1, 1), [(0, 0), (63, 0)]), [(64, 64)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("device", "axes"),
    [("cpu:8", (("a", 4), ("b", 2))), ("h100:16", (("a", 8), ("b", 2))), ("tpu-v5e:4x8", (("a", 4), ("b", 8)))],
    ids=["cpu", "gpu", "tpu"],
)
def test_tables_charge_an_op_what_the_partitioner_sends(name, device, axes):
    function, shapes = FUNCTIONS[name]
    args = [S(shape, jnp.int32 if "rows" in name and at == 1 else jnp.float32) for at, shape in enumerate(shapes)]
    problem = problem_of(function, args, device)
    mesh = MeshModel.on(problem.hardware, axes)
    space = build(problem.graph, mesh, {}, {}, {}, None, problem.facts)
    index, op = max(enumerate(problem.graph.ops), key=lambda pair: (pair[1].name in MAIN, pair[0]))
    node, reads = space.reads[index]
    layouts = (*reads, space.layouts[op.outputs[0]][1])
    values = [problem.graph.values[v] for v in (*op.inputs, *op.outputs)]
    wrong, seen = [], 0
    for label in range(0, len(layouts[0]), -(-len(layouts[0]) // MOST)):
        specs = [spec_of_label(rows[label], len(v.shape), mesh.names) for rows, v in zip(layouts, values, strict=True)]
        if op.name == "dot_general" and not _uses_every_axis(specs, mesh.names):
            continue
        seen += 1
        sent = collectives(alone(op, values, specs, axes, problem.hardware))
        charged = space.nodes[node].sent[label]
        if charged != pytest.approx(sum(c.total_bytes for c in sent), rel=1e-3, abs=8):
            wrong.append((specs, float(charged), [(c.kind, c.axes, c.total_bytes) for c in sent]))
        elif {(c.kind, len(c.axes)) for c in sent} == {("collective-permute", 1)}:
            seconds = sum(collective_s(c, problem.hardware, axes) for c in sent)
            assert space.nodes[node].sent_s[label] == pytest.approx(seconds, rel=1e-2)
    assert seen > 3 and not wrong


def alone(op, values, specs, axes, hardware):
    """An op as a program of its own, with its collectives."""
    inputs, every = range(len(op.inputs)), range(len(values))
    op = dataclasses.replace(op, form=None).of(tuple(inputs), tuple(every[len(inputs) :]))
    graph = Graph(tuple(values), (op,), op.inputs, op.outputs, (), (), ())
    given = PartitionedProgram(graph, tuple(specs), dict(axes), ())
    return insert_collectives(given, hardware.platform, hardware.topology)


def _uses_every_axis(specs, names):
    """Idle axes change how XLA computes a product (`partition.dot_general`), which the tables leave out."""
    return {axis for spec in specs for dim in spec for axis in dim} == set(names)

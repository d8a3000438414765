"""Search problems for the tests: of plans, without an API around them, and of random small programs."""

import random

import jax
import jax.numpy as jnp

import shardfn
from shardfn.cost.devices.hardware import resolve
from shardfn.frontend.trace import trace
from shardfn.search.labels import MeshModel, build, labelling_of
from shardfn.search.problem import SearchProblem

S = jax.ShapeDtypeStruct


def problem_of(function, args, device="h100:4", level=2):
    """The problem of a function whose arguments are all open; it cannot be partitioned."""
    hardware = resolve(device)
    traced = trace(function, args, (), hardware.platform)
    graph, inputs = traced.graph, traced.inputs
    return SearchProblem(
        names=tuple(map(str, inputs)), shapes=tuple(graph.values[v].shape for v in inputs),
        groups=tuple(((),) * len(graph.values[v].shape) for v in inputs), group_bytes={}, axes=(),
        specs=(None,) * len(inputs), hardware=hardware, level=level, partition=None, graph=graph, inputs=inputs,
        results={}, same_as={},
    )  # fmt: skip


def planned_problem(function, *args, **options):
    """The problem of a plan, found with the cheapest search."""
    return shardfn.plan(function, *args, **{"search_mode": "sharding_propagation", **options})._answered.problem


def choices(problem, axes):
    """The labelling of a problem on a mesh."""
    mesh = MeshModel.on(problem.hardware, axes)
    return labelling_of(build(problem.graph, mesh, {}, {}, {}, None, problem.facts), problem)


def sent_bytes(space, choice):
    """The bytes that one device sends under a choice of labels."""
    between = sum(table.sent[choice[table.first], choice[table.second]] for table in space.reshardings)
    return between + sum(node.sent[at] for node, at in zip(space.nodes, choice, strict=True))


def two_layers(x, w1, w2):
    return jax.nn.relu(x @ w1) @ w2


def looped(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=4)[0].sum()


PROGRAMS = {
    "matmul": (jnp.matmul, (S((8, 4), jnp.float32), S((4, 8), jnp.float32))),
    "two layers": (two_layers, (S((8, 4), jnp.float32), S((4, 8), jnp.float32), S((8, 4), jnp.float32))),
    "scan": (looped, (S((8, 4), jnp.float32), S((4, 4), jnp.float32))),
    "gradient": (jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (S((4, 4), jnp.float32), S((8, 4), jnp.float32))),
}


def random_program(seed):
    """A chain of products, elementwise ops, reductions, transposes and residual sums, every other one with gradients.

    Returns the function, the shapes of its arguments, and the kinds of its steps.
    """
    draw = random.Random(seed)
    size = lambda: draw.choice((2, 4, 6, 8, 16, 64, 256))  # noqa: E731
    first = (size(), size())
    shape, weights, steps = first, [], []
    for _ in range(draw.randint(1, 5)):
        kind = draw.choice(("product", "product", "square", "elementwise", "transpose", "residual", "reduce"))
        if kind == "product":
            weights.append((shape[1], size()))
            shape = (shape[0], weights[-1][1])
        elif kind == "square":  # so that a residual sum fits
            weights.append((shape[1], shape[1]))
        elif kind == "transpose":
            shape = shape[::-1]
        steps.append((kind, shape))

    def function(x, *ws):
        left, before = list(ws), {}
        for kind, _ in steps:
            before.setdefault(x.shape, x)
            if kind in ("product", "square"):
                x = x @ left.pop(0)
            elif kind == "elementwise":
                x = jnp.tanh(x)
            elif kind == "transpose":
                x = x.T
            elif kind == "residual":
                x = x + before[x.shape]
            else:
                x = x - x.mean(axis=1, keepdims=True)
        return x

    args = tuple(S(s, jnp.float32) for s in (first, *weights))
    if seed % 2:
        return jax.grad(lambda *a: (function(*a) ** 2).sum(), tuple(range(len(args)))), args, steps
    return function, args, steps

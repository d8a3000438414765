"""Function-level cases: MindSpore's `shard(fn, ...)` on an expression, on an operator, on a two-layer network."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import shardfn
from tests.conformance.deviations import Ask
from tests.conformance.facts import Case, LayoutFact
from tests.conformance.ops import TABLE
from tests.conformance.programs import floats, shapes_of_results

TEXT = {"T": lambda *shape: shape, "L": LayoutFact((2, 4), ("dp", "mp"), None)}
"""What the text of a case speaks of: tensors, and the layout that its entries are calls of."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A case as a call: `target` is a function or a `Cell`."""

    target: Callable[..., Any]
    names: tuple[str, ...]
    args: tuple[np.ndarray, ...]
    strategy: Any
    out: Any = None
    plan: Any = None
    said: Any = None
    """The entries, where they come from elsewhere than `strategy`."""

    @property
    def entries(self) -> Any:
        return self.strategy if self.said is None else self.said


def read(text: str | None) -> Any:
    """A strategy or shapes as they were written.

    >>> read("(T(4, 2), L('dp', 'None').cuts)")
    ((4, 2), (2, 1))
    """
    return None if text is None else eval(text, dict(TEXT))


@functools.cache
def call_of(case: Case) -> Call:
    """The call that a case describes."""
    if isinstance(case.shapes, dict):
        return network(case)
    shapes = read(case.shapes)
    names = tuple("xyzuvw"[: len(shapes)])
    text = f"{case.op}({', '.join(names)})" if case.op in TABLE else case.op
    known = {case.op: TABLE[case.op]().run} if case.op in TABLE else {}
    fn = eval(f"lambda {', '.join(names)}: {text}", known)
    args = tuple(floats(shape, i, False) for i, shape in enumerate(shapes))
    return Call(fn, names, args, read(case.strategy), read(case.out), read(case.plan))


def ask_of(case: Case) -> Ask:
    """What a case asks for."""
    made = call_of(case)
    results = () if made.out is None else shapes_of_results(made.target, made.args)
    return Ask(case, tuple(a.shape for a in made.args), made.entries, out=made.out, results=results)


# ---------------------------------------------------------------- the network


def layers(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, first: Callable[..., Any] = jnp.matmul) -> Any:
    """MatMul, bias, ReLU, MatMul, bias."""
    return jax.nn.relu(first(x, w1) + b1) @ w2 + b2


class Network(shardfn.mindspore.Cell):
    """The network as a Cell: its weights are attributes."""

    def __init__(self, **weights: Any):
        for name, value in weights.items():
            setattr(self, name, jnp.asarray(value))

    def __call__(self, x: Any) -> Any:
        return layers(x, self.w1, self.b1, self.w2, self.b2)


DATA: dict[Any, Any] = {"full_batch": (1, 1), "data_parallel": None}
"""The network's input under the data set strategies that have a name."""


def network(case: Case) -> Call:
    """With a strategy MindSpore shards the Cell; else the whole program, from its data set and from a seed inside."""
    arrays = {name: floats(shape, i, False) for i, (name, shape) in enumerate(case.shapes.items())}
    if case.strategy is not None:
        plan = read(case.plan)
        if isinstance(plan, dict):  # in MindSpore the Cell is the attribute `net` of what is compiled
            plan = {path.removeprefix("net."): cuts for path, cuts in plan.items()}
        cell = Network(**{name: a for name, a in arrays.items() if name != "x"})
        return Call(cell, ("x",), (arrays["x"],), read(case.strategy), read(case.out), plan)
    data, seed = case.ctx["dataset_strategy"], read(case.seed)
    first = shardfn.shard(jnp.matmul, seed, device=jax.devices()[: case.devices]) if seed else jnp.matmul
    program = lambda x, w1, b1, w2, b2: layers(x, w1, b1, w2, b2, first)  # noqa: E731
    open_ = (shardfn.AUTO,) * (len(arrays) - 1)
    if isinstance(data, str):
        return Call(program, tuple(arrays), tuple(arrays.values()), (DATA[data], *open_))
    return Call(program, tuple(arrays), tuple(arrays.values()), None, said=(*data, *open_))

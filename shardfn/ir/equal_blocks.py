"""A program with fewer of its equal blocks: the layers of an unrolled model, forward and backward.

Blocks are runs of equations that repeat, by primitive, parameters and types. Inner layers are left out, and what reads their
values reads those of the block before. The smaller program computes something else, so it serves to plan alone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core, source_info_util

from shardfn.ir.repeats import stretches, without_addresses
from shardfn.ir.rewrite import bind_one, inner

KEPT = 3
"""Blocks that stay: the first, one for all inner ones, and the last."""

FEWEST = KEPT + 1
"""So many blocks in a row are a repetition."""

PERIODS = 16
"""The periods that are tried: the commonest distances between equal matmuls."""


@dataclasses.dataclass(frozen=True)
class FewerBlocks:
    """A program with `kept` of its `count` blocks, and what of the whole program stands for what of it."""

    count: int
    """Blocks of the whole program."""
    kept: int
    """Those that stay."""
    run: Callable[..., list[Any]]
    """The program, of the inputs that stay."""
    inputs: tuple[int, ...]
    """The inputs of the whole program that stay, by position."""
    input_of: tuple[int, ...]
    """For each input of the whole program, which of those that stay stands for it."""
    outputs: tuple[int, ...]
    output_of: tuple[int, ...]
    equations: tuple[int, ...]
    """The equations of the whole program that stay, by index."""
    stands_for: Mapping[int, tuple[int, ...]]
    """By index of an equation in the whole program, those that it stands for, itself among them."""


@dataclasses.dataclass(frozen=True)
class _Run:
    """`count` blocks of `period` equations from `start` on; in the order of the program, they are of `layers`."""

    start: int
    period: int
    count: int
    slack: int = 0
    """So many equations later the run may start as well."""
    layers: tuple[int, ...] = ()

    def block(self, n: int) -> range:
        """The equations of a block."""
        return range(self.start + n * self.period, self.start + (n + 1) * self.period)


def fewer_blocks(
    jaxpr: Any, same_as: Mapping[int, int], kept: int = KEPT, consts: Sequence[Any] = ()
) -> FewerBlocks | None:
    """The program with fewer of its equal blocks; None where no block repeats, or its parts cannot be told apart.

    Args:
      jaxpr: the program.
      same_as: results, by position, that are the next value of an input.
      kept: how many blocks stay, at least `KEPT`.
      consts: the values of its constants.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda x, ws: functools.reduce(lambda x, w: jnp.tanh(x @ w), ws, x)
    >>> found = fewer_blocks(jax.make_jaxpr(f)(jnp.ones((2, 3)), [jnp.ones((3, 3))] * 6).jaxpr, {})
    >>> found.count, found.inputs, found.input_of
    (6, (0, 1, 2, 6), (0, 1, 2, 2, 2, 2, 3))
    """
    if jaxpr.effects:
        return None
    eqns = jaxpr.eqns
    steps = _dependent(jaxpr)
    runs = _layered([eqns[i] for i in steps])
    if not runs:
        return None
    count = runs[0].count
    layer_of = {steps[i]: layer for run in runs for n, layer in enumerate(run.layers) for i in run.block(n)}
    constants = {v: i for i in set(range(len(eqns))).difference(steps) for v in eqns[i].outvars}
    left_out = range(kept - 1, count - 1)
    inputs, outputs = _layers_of_inputs_and_outputs(jaxpr, layer_of, same_as)
    input_of, output_of = _stand_ins(inputs, left_out), _stand_ins(outputs, left_out)
    if input_of is None or output_of is None or not any(layer in left_out for layer in inputs):
        return None
    instead: dict[Any, Any] = {jaxpr.invars[i]: jaxpr.invars[of] for i, of in enumerate(input_of) if i != of}
    stands_for: dict[int, list[int]] = {}

    def stand(same: int, own: int) -> None:
        """Let an equation stand for one that is left out, and the constants that it reads for those of the other if these are
        made alike."""
        is_alike = eqns[same].primitive is eqns[own].primitive and len(eqns[same].invars) == len(eqns[own].invars)
        if same != own and is_alike and own not in (known := stands_for.setdefault(same, [same])):
            known.append(own)
            for a, b in zip(eqns[same].invars, eqns[own].invars, strict=True):
                if not isinstance(a, core.Literal) and a in constants and b in constants:
                    stand(constants[a], constants[b])

    for run in runs:
        by_layer = {layer: n for n, layer in enumerate(run.layers)}
        before = None
        for n, layer in enumerate(run.layers):
            if layer not in left_out:
                before = n
                continue
            if before is None or kept - 2 not in by_layer:
                return None
            blocks = (run.block(n), run.block(before), run.block(by_layer[kept - 2]))
            for own, there, same in zip(*([steps[i] for i in block] for block in blocks), strict=True):
                instead |= dict(zip(eqns[own].outvars, eqns[there].outvars, strict=True))
                stand(same, own)
    kept_outputs = [i for i, of in enumerate(output_of) if i == of]

    def read(v: Any) -> Any:
        return v if isinstance(v, core.Literal) else instead.get(v, v)

    results = [read(jaxpr.outvars[i]) for i in kept_outputs]
    needed = {v for v in results if not isinstance(v, core.Literal)}
    equations: list[int] = []
    for i in reversed(range(len(eqns))):
        if layer_of.get(i) not in left_out and not needed.isdisjoint(eqns[i].outvars):
            equations.append(i)
            needed |= {read(v) for v in eqns[i].invars if not isinstance(v, core.Literal)}
    equations.reverse()
    kept_inputs = [i for i, of in enumerate(input_of) if i == of]
    names = [jaxpr.invars[i] for i in kept_inputs]

    def run_fewer(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *names], [*consts, *args], strict=True))

        def value(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else env[read(v)]

        for i in equations:
            source = eqns[i].source_info
            with source_info_util.user_context(source.traceback, name_stack=source.name_stack):
                env.update(zip(eqns[i].outvars, bind_one(eqns[i], [value(v) for v in eqns[i].invars]), strict=True))
        return [value(v) for v in results]

    at_input, at_output = ({i: n for n, i in enumerate(kept)} for kept in (kept_inputs, kept_outputs))
    return FewerBlocks(
        count, kept, run_fewer, tuple(kept_inputs), tuple(at_input[i] for i in input_of), tuple(kept_outputs),
        tuple(at_output[i] for i in output_of), tuple(equations), {i: tuple(of) for i, of in stands_for.items()},
    )  # fmt: skip


# ---- equal equations in a row


def _dependent(jaxpr: Any) -> list[int]:
    """The equations that depend on an input. Constants are of no block: the first one that reads them may make them for all."""
    known, found = set(jaxpr.invars), list[int]()
    for i, eqn in enumerate(jaxpr.eqns):
        if any(not isinstance(v, core.Literal) and v in known for v in eqn.invars):
            known.update(eqn.outvars)
            found.append(i)
    return found


def _runs(eqns: Sequence[Any]) -> list[_Run]:
    """The runs of equal blocks with matmuls, without overlap, in program order; of the longest ones first."""
    tokens, heavy = _tokens(eqns), [i for i, eqn in enumerate(eqns) if _is_heavy(eqn)]
    found, ranges = list[_Run](), [(0, len(eqns))]
    while ranges:
        low, high = ranges.pop()
        inside = [i for i in heavy if low <= i < high]
        if len(inside) >= FEWEST and (best := _longest(tokens, inside, low, high)) is not None:
            found.append(best)
            ranges += [(low, best.start), (best.block(best.count - 1).stop + best.slack, high)]
    return sorted(found, key=lambda run: run.start)


def _longest(tokens: np.ndarray, heavy: Sequence[int], low: int, high: int) -> _Run | None:
    """The run that repeats most equations."""
    places: dict[int, list[int]] = {}
    for i in heavy:
        places.setdefault(int(tokens[i]), []).append(i)
    distances = collections.Counter(
        there[n + skip] - there[n]
        for there in places.values()
        for skip in range(1, 1 + len(there) // (FEWEST - 1))
        for n in range(len(there) - skip)
    )
    part, found = tokens[low:high], list[_Run]()
    for period, _ in distances.most_common(PERIODS):
        for first, length in stretches(part, period):
            if length // period >= FEWEST - 1:
                found.append(_Run(low + first, period, length // period + 1, length % period))
    return max(found, key=lambda run: (run.period * (run.count - 1), -run.period), default=None)


def _is_heavy(eqn: Any) -> bool:
    return eqn.primitive.name in ("dot_general", "conv_general_dilated") or any(
        _is_heavy(each) for inside in inner(eqn) for each in inside.eqns
    )


def _tokens(eqns: Sequence[Any]) -> np.ndarray:
    """A number for each equation, the same for equal ones."""
    numbers: dict[object, int] = {}

    @functools.cache
    def text(of: int) -> str:
        return without_addresses(kept[of])

    kept: dict[int, Any] = {}

    def parameter(value: Any) -> object:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        kept[id(value)] = value  # alive, so that its identity stays its own
        return text(id(value))

    def token(eqn: Any) -> object:
        values = (str(v) if isinstance(v, core.Literal) else "" for v in eqn.invars)
        types = (v.aval for v in (*eqn.invars, *eqn.outvars))
        parameters = tuple((name, parameter(value)) for name, value in eqn.params.items())
        return eqn.primitive.name, parameters, tuple(values), tuple(map(_type_of, types))

    return np.array([numbers.setdefault(token(eqn), len(numbers)) for eqn in eqns], np.int64)


def _type_of(aval: Any) -> object:
    return getattr(aval, "shape", ()), str(getattr(aval, "dtype", aval)), getattr(aval, "weak_type", False)


# ---- layers


def _layered(eqns: Sequence[Any]) -> list[_Run]:
    """The runs of the layers of a model, forward and backward, each with the layer of every block; empty without any.

    The longest run counts the layers, or one of one block more: the backward pass of the first or the last layer may differ. Each
    other run is in the order, from the start, that agrees best with the values that it reads."""
    if not (runs := _runs(eqns)):
        return []
    longest = max(runs, key=lambda run: run.period * run.count)
    count = max(run.count for run in runs if run.count <= longest.count + 1)
    found, layer_of = list[_Run](), dict[Any, int]()
    for run in (run for run in runs if run.count in (count, count - 1)):
        if not found and run.count < count:
            continue
        up = tuple(range(run.count))
        orders = [up] if not found else [
            order for first in range(count - run.count + 1)
            for order in (tuple(n + first for n in up), tuple(n + first for n in reversed(up)))
        ]  # fmt: skip
        placed = [
            dataclasses.replace(run, start=run.start + late, slack=0, layers=order)
            for order in orders
            for late in range(run.slack + 1)
        ]
        best = min(placed, key=lambda one: _disagreement(eqns, one, layer_of))
        found.append(best)
        for n, layer in enumerate(best.layers):
            layer_of |= {v: layer for i in best.block(n) for v in eqns[i].outvars}
    return found


def _disagreement(eqns: Sequence[Any], run: _Run, layer_of: Mapping[Any, int]) -> tuple[int, int]:
    """How many values that a run reads are of another layer, and how many its blocks hand on."""
    read = [
        (layer, v)
        for n, layer in enumerate(run.layers)
        for i in run.block(n)
        for v in eqns[i].invars
        if not isinstance(v, core.Literal)
    ]
    made = {v for i in run.block(0) for v in eqns[i].outvars}
    carried = {
        v
        for i in run.block(1)
        for v in eqns[i].invars
        if not isinstance(v, core.Literal) and v in made and v.aval.shape
    }
    return sum(layer_of.get(v, layer) != layer for layer, v in read), len(carried)


def _layers_of_inputs_and_outputs(
    jaxpr: Any, layer_of: Mapping[int, int], same_as: Mapping[int, int]
) -> tuple[list[int], list[int]]:
    """The layer of each input and of each output of a program; -1 for none.

    An input is of the layer that alone reads it, or something made of it; an output is of the layer that it is made of. Numbers
    such as a norm of all gradients do not count. An input whose next value is an output is of its layer.
    """
    eqns = jaxpr.eqns
    reading: dict[Any, frozenset[int]] = {}
    for i in reversed(range(len(eqns))):
        own = frozenset({layer_of[i]}) if i in layer_of else _union(reading, eqns[i].outvars)
        for v in _arrays(eqns[i].invars):
            reading[v] = reading.get(v, frozenset()) | own
    made: dict[Any, frozenset[int]] = {}
    inputs = [_only(reading.get(v, frozenset())) for v in jaxpr.invars]
    made |= {v: frozenset({layer}) for v, layer in zip(jaxpr.invars, inputs, strict=True) if layer >= 0}
    for i, eqn in enumerate(eqns):
        own = frozenset({layer_of[i]}) if i in layer_of else _union(made, _arrays(eqn.invars))
        made |= dict.fromkeys(eqn.outvars, own)
    outputs = [_only(made.get(v, frozenset())) if not isinstance(v, core.Literal) else -1 for v in jaxpr.outvars]
    for result, argument in same_as.items():
        if inputs[argument] < 0:
            inputs[argument] = outputs[result]
        outputs[result] = inputs[argument]
    return inputs, outputs


def _arrays(values: Iterable[Any]) -> Iterator[Any]:
    return (v for v in values if not isinstance(v, core.Literal) and getattr(v.aval, "shape", ()))


def _union(known: Mapping[Any, frozenset[int]], values: Iterable[Any]) -> frozenset[int]:
    return frozenset[int]().union(*(known.get(v, frozenset()) for v in values))


def _only(layers: frozenset[int]) -> int:
    return next(iter(layers)) if len(layers) == 1 else -1


def _stand_ins(layers: Sequence[int], left_out: range) -> list[int] | None:
    """For each array, which stands for it: itself, or the same of the last layer before those that are left out. None where these
    layers have not the same number of arrays."""
    of_layer: dict[int, list[int]] = {}
    for i, layer in enumerate(layers):
        of_layer.setdefault(layer, []).append(i)
    same = of_layer.get(left_out.start - 1, [])
    found = list(range(len(layers)))
    for layer in left_out:
        own = of_layer.get(layer, [])
        if len(own) != len(same):
            return None
        for i, there in zip(own, same, strict=True):
            found[i] = there
    return found

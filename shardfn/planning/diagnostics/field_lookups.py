"""Lookups of several fields in one table: each field's ids have an offset, the number of the first of its rows."""

from __future__ import annotations

from typing import NamedTuple

from shardfn.ir.model import Graph, Op


class FieldLookup(NamedTuple):
    """A lookup: the op, the argument of the function that is the table, and the number of fields."""

    op: Op
    table: int
    fields: int


def field_lookups(graph: Graph) -> list[FieldLookup]:
    """The lookups in tables that are arguments, at ids to which a constant for each field is added."""
    gathers = [op for op in graph.ops if op.name == "gather" and len(graph.values[op.inputs[0]].shape) == 2]
    producers = {v: op for op in graph.ops for v in op.outputs} if gathers else {}
    inputs, found = {v: i for i, v in enumerate(graph.inputs)}, []
    for op in gathers:
        table, (*_, fields, one) = _source(op.inputs[0], producers), (1, 1, *graph.values[op.inputs[1]].shape)
        if table in inputs and one == 1 < fields and _has_offsets(op.inputs[1], fields, graph, producers):
            found.append(FieldLookup(op, inputs[table], fields))
    return found


def _source(value: int, producers: dict[int, Op]) -> int:
    """What a value is a conversion or a broadcast of."""
    while value in producers and len(producers[value].inputs) == 1:
        (value,) = producers[value].inputs
    return value


def _has_offsets(ids: int, fields: int, graph: Graph, producers: dict[int, Op]) -> bool:
    """Whether ids are a sum with a constant [fields], broadcast over the batch."""
    waiting, seen, inputs = [ids], {ids}, {*graph.inputs}
    while waiting:
        op = producers.get(waiting.pop())
        if op is None or len(graph.values[op.outputs[0]].shape) < 2:
            continue
        for v in op.inputs if op.name == "add" else ():
            source = _source(v, producers)
            if graph.values[source].shape == (fields,) and _is_constant(source, inputs, producers):
                return True
        waiting += [v for v in op.inputs if v not in seen]
        seen.update(op.inputs)
    return False


def _is_constant(value: int, inputs: set[int], producers: dict[int, Op]) -> bool:
    """Whether a value is made of constants alone, such as `jnp.arange(fields) * rows`. An `iota` itself has positions."""
    if value in producers and producers[value].name == "iota":
        return False
    waiting, seen = [value], {value}
    while waiting:
        v = waiting.pop()
        if v in inputs:
            return False
        more = {*producers[v].inputs} - seen if v in producers else set()
        waiting += more
        seen |= more
    return True

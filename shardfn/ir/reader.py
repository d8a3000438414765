"""Reads a module: its ops and values as a `Graph`, with the sharding of each value where Shardy has set one.

Calls are read inline, once for each call site, so that two callers of one function stay two.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardfn.ir.extra_rules import MISSING_RULES, elementwise_rule, pairwise_rule
from shardfn.ir.mlir import (
    MESH_NAME,
    NUMBER,
    functions_of,
    ir,
    mesh_axes,
    meshes_of,
    number_of,
    sdy,
    short_name,
    symbol_of,
    value_of,
)
from shardfn.ir.model import Graph, Op, Spec, Value
from shardfn.ir.op_attributes import form_of, neutral_operand, op_by_attributes, op_line, rule_of, trip_count
from shardfn.ir.op_traits import COLLECTIVE_OPS, TOKEN_OPS
from shardfn.ir.partitioned import USER_WRITTEN, Communication
from shardfn.ir.purposes import purpose_in
from shardfn.ir.source_lines import OURS


class _Fact(NamedTuple):
    """What an op is, whatever the shardings and the loop around it."""

    op: Op
    """With its results, but without values; the first number of `form` is final."""
    results: tuple[Value, ...]
    unruled: str
    made: dict[tuple[int, int, int], Op]
    """The op made of it last, by trips, region and instances: programs of one module number most values alike."""


class ReaderCache:
    """What was read before of this module, or of another one with the same ops; nothing here depends on shardings.

    Facts are kept by number, and by number and location: ops that Shardy merges can be in either's position. Shardy's own
    ops have no number; theirs are kept by all that is read of them.

    Args:
      assumed_trips: how often loops are counted whose length is not known before they run.
    """

    def __init__(self, assumed_trips: int = 1) -> None:
        self.assumed_trips = assumed_trips
        self.types: dict[Any, Value] = {}
        self.kinds: dict[Any, Op] = {}
        self.lines: dict[Any, str] = {}
        self.array_specs: dict[Any, Spec | None] = {}
        self.specs: dict[Any, tuple[Spec | None, ...]] = {}
        self.facts: dict[Any, _Fact] = {}
        self.forms: dict[Any, int] = {None: -1}


class UnreadOpError(Exception):
    """An op that was not read before, in a module without rules."""


class Reader:
    """Walks one module once; the lists fill as it goes.

    Args:
      module: the module.
      seen: what was read before of one with the same ops.
      count: how many ops the module had as JAX lowered it; 0 where it has no rules, and all is to be in `seen`.
      alone: by number what an op is that Shardy merges with no other one, None until it is read.
    """

    def __init__(
        self,
        module: Any,
        seen: ReaderCache | None = None,
        count: int = 0,
        alone: dict[Any, _Fact | None] | None = None,
    ):
        self.functions = {symbol_of(f): f for f in functions_of(module)}
        self.module = module
        self.values: list[Value] = []
        self.specs: list[Spec] = []
        self.ops: list[Op] = []
        self.ties: list[tuple[int, int]] = []
        self.unruled: dict[str, None] = {}
        self.uncounted: dict[str, None] = {}
        self.communications: list[Communication] = []
        self.manual = False
        """Whether no axis is free where it is read."""
        self.bound: frozenset[str] = frozenset()
        """The manual axes of the `shard_map`s that are read."""
        self.line = ""
        """The user's line of the `shard_map` or the call that is read, for ops inside that a library wrote."""
        self.purpose = ""
        """What the `shard_map` or the call that is read is for, where this library wrote it."""
        self.is_ours = False
        """Whether a function of this library is read (`OURS`)."""
        self.instances = 1
        """How many devices run what is read, each on shards of its own."""
        self.shards: list[tuple[int, int]] = []
        self.region = self.regions = 0
        """The number of the loop's body or the branch that is read, and of how many there were so far."""
        self.seen = seen or ReaderCache()
        self.count, self.alone = count, {} if alone is None else alone

    @functools.cached_property
    def meshes(self) -> dict[str, dict[str, int]]:
        """The axes of each mesh; only collectives of the user's need them."""
        return {symbol_of(op): dict(mesh_axes(op.attributes["mesh"])) for op in meshes_of(self.module)}

    def graph(self) -> Graph:
        main = self.functions["main"]
        block = main.regions[0].blocks[0]
        arg_attrs = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else None
        env: dict[Any, int] = {}
        for i, argument in enumerate(block.arguments):
            attrs: Any = ir.DictAttr(arg_attrs[i]) if arg_attrs is not None else ()
            sharding = attrs["sdy.sharding"] if "sdy.sharding" in attrs else None
            env[argument] = self.new(self.value(argument.type), self.spec(sharding))
        inputs = tuple(env[a] for a in block.arguments)
        outputs = self.walk(block, env, 1)
        if "res_attrs" in main.attributes:
            attributes = [ir.DictAttr(attrs) for attrs in main.attributes["res_attrs"]]
            outputs = tuple(
                self.with_sharding(v, attrs["sdy.sharding"]) if "sdy.sharding" in attrs else v
                for v, attrs in zip(outputs, attributes, strict=True)
            )
        return Graph(
            tuple(self.values), tuple(self.ops), inputs, outputs, tuple(self.ties),
            tuple(self.unruled), tuple(self.uncounted), manual=tuple(self.shards),
        )  # fmt: skip

    def where(self, op: Any) -> str:
        """The user's line of an op; few ops have one of their own, and printing a location takes long."""
        if self.is_ours:
            return self.line
        location = op.location.attr
        found = self.seen.lines.get(location)
        if found is None:
            found = self.seen.lines[location] = op_line(op)
        return found or self.line

    def purpose_of(self, op: Any) -> str:
        """What a collective is for that this library wrote, or the calls around it."""
        return purpose_in(str(op.location)) or self.purpose

    # ---- values

    def new(self, value: Value, spec: Spec | None) -> int:
        self.values.append(value)
        self.specs.append(spec if spec is not None else ((),) * len(value.shape))
        return len(self.values) - 1

    def value(self, type_: Any) -> Value:
        found = self.seen.types.get(type_)
        if found is None:
            found = self.seen.types[type_] = value_of(type_)
        return found

    def spec(self, attribute: Any) -> Spec | None:
        if attribute is None or self.manual:
            return None
        known = self.seen.array_specs
        if attribute not in known:
            dims = sdy.TensorShardingAttr(attribute).dimension_shardings
            spec = tuple(tuple(_axis(a) for a in sdy.DimensionShardingAttr(d).axes) for d in dims)
            known[attribute] = spec or None  # a scalar, or a host callback, which holds its array on one device
        return known[attribute]

    def results(self, op: Any, attrs: Any = None, values: Sequence[Value] | None = None) -> tuple[int, ...]:
        """New values for an op's results, with their shardings."""
        attrs = op.attributes if attrs is None else attrs
        values = [self.value(r.type) for r in op.results] if values is None else values
        specs: Sequence[Spec | None] = ()
        if self.manual or not values:
            pass
        elif "sdy.sharding" in attrs:
            attribute, known = attrs["sdy.sharding"], self.seen.specs
            if attribute not in known:
                known[attribute] = tuple(map(self.spec, sdy.TensorShardingPerValueAttr(attribute).shardings))
            specs = known[attribute]
        elif "out_sharding" in attrs:
            specs = (self.spec(attrs["out_sharding"]),)
        elif op.name == "sdy.sharding_constraint" or op.name == "sdy.reshard":
            specs = (self.spec(attrs["sharding"]),)
        if len(values) == 1:
            return (self.new(values[0], specs[0] if specs else None),)
        return tuple([self.new(value, specs[i] if i < len(specs) else None) for i, value in enumerate(values)])

    def with_sharding(self, value: int, sharding: Any, trips: int = 1) -> int:
        """The value in the given sharding: through a reshard, if it has another one."""
        spec = self.spec(sharding)
        if spec is None or spec == self.specs[value]:
            return value
        form = self.values[value]
        resharded = self.new(form, spec)
        self.ops.append(Op("reshard", (value,), (resharded,), elementwise_rule([form], [form]), trips, ""))
        return resharded

    # ---- ops

    def walk(self, block: Any, env: dict[Any, int], trips: int) -> tuple[int, ...]:
        """Read the ops of a block; returns the ids of what its terminator hands back."""
        for view in block.operations:
            op = view.operation
            name = op.name
            if name in _TERMINATORS:
                return tuple(env[o] for o in op.operands)
            visit = _STRUCTURED.get(name)
            if visit is not None:
                ids = visit(self, op, env, trips)
            else:
                ids = self.plain(op, name, env, trips)
            if len(ids) == 1:
                env[op.results[0]] = ids[0]
            else:
                env.update(zip(op.results, ids, strict=True))
        return ()

    def within(self, block: Any, env: dict[Any, int], trips: int) -> tuple[int, ...]:
        """`walk`, of a block that is a computation of its own."""
        around, self.regions = self.region, self.regions + 1
        self.region = self.regions
        out = self.walk(block, env, trips)
        self.region = around
        return out

    def plain(self, op: Any, name: str, env: dict[Any, int], trips: int) -> Sequence[int]:
        attrs = op.attributes
        if name in _NO_OPS:
            return self.results(op, attrs)
        number = attrs[NUMBER] if NUMBER in attrs else None
        fact = self.alone.get(number)
        if fact is None:
            is_shardys = number is None or name.startswith("sdy.")
            fact = (self.known_shardys if is_shardys else self.known)(op, name, attrs, number)
            if number in self.alone:
                self.alone[number] = fact
        outputs = self.results(op, attrs, fact.results)
        if fact.unruled:
            self.unruled.setdefault(fact.unruled)
        inputs, kind = tuple([env[o] for o in op.operands]), (trips, self.region, self.instances)
        made = fact.made.get(kind)
        if made is None:
            form = fact.op.form and (fact.op.form[0], self.region)
            made = fact.op.replaced(trips=trips, form=form, instances=self.instances, inputs=inputs, outputs=outputs)
            fact.made[kind] = made
        elif made.inputs != inputs or made.outputs != outputs:
            made = fact.made[kind] = made.of(inputs, outputs)
        self.ops.append(made)
        return outputs

    def known(self, op: Any, name: str, attrs: Any, number: Any) -> _Fact:
        """What a numbered op is, as it was seen before, here or in the same place."""
        facts, at = self.seen.facts, (number, op.location.attr)
        found = facts.get(at)
        if found is None:
            if number in facts:
                same = facts[number].op
                same = same.replaced(where=self.where(op) or same.where)
                unruled = _at(same.name, same.where) if facts[number].unruled else ""
                found = _Fact(same, facts[number].results, unruled, {})
            elif self.count:
                found = facts[number] = self.fact(op, name, attrs)
            else:
                raise UnreadOpError
            facts[at] = found
        return found

    def known_shardys(self, op: Any, name: str, attrs: Any, number: Any) -> _Fact:
        """`known`, of an op of Shardy's own."""
        if "sharding" not in attrs or "sdy.sharding_rule" in attrs:
            return self.fact(op, name, attrs)
        key = name, op.location.attr, op.operands[0].type, attrs["sharding"], number
        found = self.seen.facts.get(key)
        if found is None:
            found = self.seen.facts[key] = self.fact(op, name, attrs)
            if number is not None:
                self.seen.facts.setdefault(number, found)
        return found

    def fact(self, op: Any, name: str, attrs: Any) -> _Fact:
        """What an op is."""
        short = short_name(op) if name.startswith(("stablehlo.", "chlo.", "sdy.")) else name
        if name == "stablehlo.custom_call":
            short = f"custom_call {ir.StringAttr(attrs['call_target_name']).value}"
        where = self.where(op)
        results = tuple([self.value(r.type) for r in op.results])
        rule, unruled = attrs["sdy.sharding_rule"] if "sdy.sharding_rule" in attrs else None, ""
        is_missing = rule is None and short in MISSING_RULES
        if rule is None and not is_missing and not name.startswith("sdy.") and short not in _NO_RULE_NEEDED:
            unruled = _at(short, where)
        number = self.seen.forms.setdefault(form_of(op), len(self.seen.forms))
        kind, made = (number, rule, *[o.type for o in op.operands]), self.seen.kinds
        like = made.get(kind) if number >= 0 else None
        if like is None:
            found = rule if rule is None else rule_of(rule)
            if is_missing:
                found = MISSING_RULES[short]([self.value(o.type) for o in op.operands], results)
            like = made[kind] = op_by_attributes(op, short, rule=found, form=None if number < 0 else (number, 0))
        site = number_of(op)
        is_numbered = site < self.count or name.startswith("sdy.")
        own = like.replaced(where=where, site=site if is_numbered else -1, same=neutral_operand(op))
        return _Fact(own, results, unruled, {})

    def call(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        """A function or a named computation, inline."""
        is_call = op.name == "func.call"
        name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value if is_call else ""
        body = self.functions[name] if is_call else op
        block = body.regions[0].blocks[0]
        inner = {argument: env[o] for argument, o in zip(block.arguments, op.operands, strict=True)}
        around, purpose = (self.line, self.purpose, self.is_ours), self.purpose_of(op)
        self.line, self.purpose, self.is_ours = self.where(op), purpose, name.startswith(OURS)
        returned = self.walk(block, inner if is_call else {**env, **inner}, trips)
        self.line, self.purpose, self.is_ours = around
        return returned

    def loop(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        condition, body = (r.blocks[0] for r in op.regions)
        count = trip_count(op, condition, body)
        if count is None:
            self.uncounted.setdefault(self.where(op))
        inside = trips * (self.seen.assumed_trips if count is None else count)
        carried = [env[o] for o in op.operands]
        results = self.results(op)
        returned = body.operations[len(body.operations) - 1].operation.operands
        ids = []
        for argument, operand, result, back in zip(body.arguments, carried, results, returned, strict=True):
            if back == argument:  # the same in every iteration: what is gathered of it is gathered once
                ids.append(operand)
            else:
                ids.append(self.new(self.values[result], self.specs[result]))
                self.ties.append((operand, ids[-1]))
        self.within(condition, {**env, **dict(zip(condition.arguments, ids, strict=True))}, inside)
        out = self.within(body, {**env, **dict(zip(body.arguments, ids, strict=True))}, inside)
        self.ties += [(a, b) for a, b in zip(ids, out, strict=True) if a != b]
        self.ties += list(zip(out, results, strict=True))
        inputs, form = tuple(carried) + out, (-1, self.region)
        self.ops.append(Op("while", inputs, results, None, trips, self.where(op), form=form, seen=tuple(ids)))
        return results

    def branch(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        results = self.results(op)
        returned: tuple[int, ...] = ()
        for region in op.regions:
            out = self.within(region.blocks[0], dict(env), trips)
            self.ties += list(zip(out, results, strict=True))
            returned += out
        self.ops.append(Op("case", (env[op.operands[0]], *returned), results, None, trips, self.where(op)))
        return results

    def manual_region(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        """`shard_map`: inside, shapes are those of one device, and the user wrote the collectives. XLA shards what is there
        over axes that are not manual."""
        block = op.regions[0].blocks[0]
        out_specs = [self.spec(s) for s in sdy.TensorShardingPerValueAttr(op.attributes["out_shardings"]).shardings]
        in_shardings = sdy.TensorShardingPerValueAttr(op.attributes["in_shardings"]).shardings
        inputs = tuple(self.with_sharding(env[o], s, trips) for o, s in zip(op.operands, in_shardings, strict=True))
        was, around, outside = (self.manual, self.bound), self.instances, (self.line, self.purpose)
        sizes, manual = self.manual_axes(op)
        self.bound |= manual
        free = {axis for axis, size in sizes.items() if size > 1} - self.bound
        inside = [tuple(tuple(a for a in dim if a in free) for dim in self.spec(s) or ()) for s in in_shardings]
        self.manual, self.instances = self.manual or not free, around * math.prod(sizes.get(axis, 1) for axis in manual)
        self.line, self.purpose = self.where(op), self.purpose_of(op)
        rows = zip(block.arguments, inside, strict=True)
        inner = {**env, **{a: self.new(self.value(a.type), spec if free else None) for a, spec in rows}}
        returned = self.within(block, inner, trips)
        (self.manual, self.bound), self.instances, (self.line, self.purpose) = was, around, outside
        outputs = tuple([self.new(self.value(r.type), s) for r, s in zip(op.results, out_specs, strict=True)])
        self.shards += [
            *zip(inputs, (inner[a] for a in block.arguments), strict=True),
            *zip(outputs, returned, strict=True),
        ]
        self.ops.append(Op("shard_map", (*inputs, *returned), outputs, None, trips, self.where(op)))
        return outputs

    def communicate(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        """A collective that is written in a `shard_map`, by the user or by this library."""
        kind, (axes, size) = op.name.split(".")[1].replace("_", "-"), self.groups(op)
        inputs, outputs = tuple(env[o] for o in op.operands), self.results(op)
        for operand, out in zip(inputs, outputs, strict=False):
            self.communications.append(
                Communication(
                    kind, axes, size, operand, out, trips, self.where(op), USER_WRITTEN, purpose=self.purpose_of(op)
                )
            )
            if kind != "all-to-all":  # the others keep the order of dimensions
                self.shards.append((operand, out))
        values = ([self.values[v] for v in row] for row in (inputs, outputs))
        rule = None if self.manual else pairwise_rule(*values)  # XLA may shard it over the free axes
        self.ops.append(Op(op.name.split(".")[1], inputs, outputs, rule, trips, self.where(op)))
        return outputs

    def custom_call(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        """A ragged all-to-all sends at most the rows that fit at both ends; what it sends is known when it runs."""
        if ir.StringAttr(op.attributes["call_target_name"]).value != "ragged_all_to_all":
            return self.plain(op, op.name, env, trips)
        axes, size = self.groups(op)
        sent, filled, *rest = (env[o] for o in op.operands)
        most = min(sent, filled, key=lambda v: math.prod(self.values[v].shape))
        outputs = self.results(op)
        self.communications.append(
            Communication("all-to-all", axes, size, most, outputs[0], trips, self.where(op), USER_WRITTEN)
        )
        self.ops.append(Op("all_to_all", (sent, filled, *rest), outputs, None, trips, self.where(op)))
        return outputs

    def manual_axes(self, op: Any) -> tuple[dict[str, int], frozenset[str]]:
        """The mesh of a `shard_map`, and its manual axes."""
        text = f"{op.attributes['in_shardings']} {op.attributes['out_shardings']}"
        found = re.search(r"<@([^\s,>]+)", text)
        sizes = self.meshes.get(found[1], {}) if found else dict(mesh_axes(text))
        return sizes, frozenset(re.findall(r'"([^"]+)"', str(op.attributes["manual_axes"])))

    def groups(self, op: Any) -> tuple[tuple[str, ...], int]:
        """Axes of the plan's mesh (where they are known) and group size of a collective that the user wrote in a `shard_map`."""
        attrs = op.attributes["backend_config"] if "backend_config" in op.attributes else op.attributes
        if "replica_groups" not in attrs:
            pairs = _numbers(attrs["source_target_pairs"])
            axes, size = self.axes_along(pairs)
            return axes, size if axes else min(2, 1 + len(pairs))
        named = re.search(r"mesh = @(\w+), axes = (.*)", str(attrs["replica_groups"]))
        if named is None:
            members = _numbers(attrs["replica_groups"])
        else:
            sizes, along = self.meshes.get(named[1], {}), _AXIS_REF_NAME.findall(named[2])
            places = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
            at = [i for i, axis in enumerate(sizes) if axis in along]
            members = np.moveaxis(places, at, range(-len(at), 0)).reshape(-1, math.prod(places.shape[i] for i in at))
        axes, size = self.axes_along(members)
        return axes if size == members.shape[1] else (), members.shape[1]

    def axes_along(self, members: np.ndarray[Any, Any]) -> tuple[tuple[str, ...], int]:
        """The axes of the plan's mesh along which the devices of each row differ, and how many devices are along them."""
        sizes = self.meshes.get(MESH_NAME, {})
        if not members.size or members.max() >= math.prod(sizes.values()):
            return (), 1
        places = np.unravel_index(members, tuple(sizes.values()))
        axes = tuple(axis for axis, at in zip(sizes, places, strict=True) if (at != at[:, :1]).any())
        return axes, math.prod(sizes[axis] for axis in axes)


def _numbers(attribute: Any) -> np.ndarray[Any, Any]:
    """The numbers of a dense attribute, row by row."""
    return np.array(ir.DenseIntElementsAttr(attribute)).reshape(ir.RankedTensorType(attribute.type).shape)


_NO_OPS = frozenset({"stablehlo.constant", "sdy.constant", "sdy.mesh"})


_TERMINATORS = frozenset({"func.return", "stablehlo.return", "sdy.return"})


_NO_RULE_NEEDED = TOKEN_OPS | {"iota"}


_AXIS_REF_NAME = re.compile(r'name = "([^"]+)"')


_STRUCTURED = {
    "func.call": Reader.call,
    "stablehlo.while": Reader.loop,
    "stablehlo.case": Reader.branch,
    "stablehlo.if": Reader.branch,
    "sdy.manual_computation": Reader.manual_region,
    "stablehlo.custom_call": Reader.custom_call,
    "sdy.named_computation": Reader.call,
    **{f"stablehlo.{name}": Reader.communicate for name in COLLECTIVE_OPS},
}


def _at(name: str, where: str) -> str:
    return f"{name} ({where})" if where else name


def _axis(attribute: Any) -> str:
    ref = sdy.AxisRefAttr(attribute)
    if ref.sub_axis_info is None:
        return ref.name
    info = sdy.SubAxisInfoAttr(ref.sub_axis_info)
    return f"{ref.name}:({info.pre_size}){info.size}"

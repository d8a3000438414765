"""The one user of `jax.extend.mlir`: a lowered module in, a `Graph` or a `Flow` out.

Two passes over a copy of the module that JAX lowered:

* `read_graph`: Shardy's rule for every op, before anything is placed;
* `propagate`: the given layouts carried through every value; `graph.roads` then says what is sent between devices.

Calls are read in place, once for each call site, so that two callers of one function stay two.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

from shardfn.graph.model import Communication, Convolution, Dims, Flow, Graph, Op, Pin, Rule, Spec, Tap, Value
from shardfn.graph.rules import MISSING_RULES, elementwise_rule
from shardfn.graph.windows import ATTRIBUTES, WINDOWED, taps

GRID = "grid"  # the name of our mesh inside the module

RULES_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
FLOW_PIPELINE = "builtin.module(sdy-propagation-pipeline)"

_NUMBER = "number"
"""Of an op in `Ready.module`: an attribute that stays on it through the passes, and on its copies."""


def _run(pipeline: str, module: Any) -> None:
    """Run passes on a module that is verified once, before: again after each pass takes twice as long as the passes do."""
    module.verify()
    passes = passmanager.PassManager.parse(pipeline)
    passes.enable_verifier(False)
    passes.run(module)


def flat(module: Any) -> Any:
    """A copy of a lowered module (`jax.stages.Lowered.compiler_ir("stablehlo")`) in which every call of a function has
    a function of its own, so that two callers can lay it out in two ways."""
    with module.context, ir.Location.unknown():
        copy = module.operation.clone()
        _run("builtin.module(sdy-flatten-call-graph)", copy)
        return copy


def read_graph(module: Any, seen: Seen | None = None) -> Graph:
    """The ops of a lowered module with Shardy's rules; with `seen`, what is read is kept there for its flows."""
    with module.context, ir.Location.unknown():
        copy = module.operation.clone()
        count = _number(_preorder(copy), 0)
        _run(RULES_PIPELINE, copy)
        return _Reader(copy, seen, count).graph()


def propagate(
    module: Any,
    axes: Sequence[tuple[str, int]],
    inputs: Sequence[Spec | None],
    outputs: Sequence[Spec | None],
    pins: Mapping[int, Pin] | None = None,
    ready: Ready | None = None,
) -> Flow:
    """Carry layouts through the function with Shardy and read what lies where; `graph.roads` adds what is sent.

    Args:
      module: the module as JAX lowered it; it is not changed.
      axes: the grid, as (name, size) in row-major order.
      inputs: the layout of every argument of the module's main function; None leaves it to propagation.
      outputs: the same for its results.
      pins: by `Op.site`, layouts in which an op inside reads its operands and leaves its results.
      ready: `as_propagated` of the module, which saves the time for all flows but the first.
    """
    ready = ready or as_propagated(module)
    with module.context, ir.Location.unknown():
        copy = ready.module.clone()
        main = next(f for f in _functions(copy) if _symbol(f) == "main")
        if pins:
            _hold(main.regions[0].blocks[0], pins, ready)
        _add_mesh(copy, axes)
        for attribute, specs in (("arg_attrs", inputs), ("res_attrs", outputs)):
            old = main.attributes[attribute] if attribute in main.attributes else None
            main.attributes[attribute] = ir.ArrayAttr.get(
                [ready.with_sharding(old[i] if old is not None else None, spec) for i, spec in enumerate(specs)]
            )
        _run(FLOW_PIPELINE, copy)
        reader = _Reader(copy, ready.seen)
        try:
            graph = reader.graph()
        except _Unknown:  # the first flow: a few ops are in no other form of the module
            _run(RULES_PIPELINE, copy)
            reader = _Reader(copy, ready.seen, ready.count)
            graph = reader.graph()
        return Flow(graph, tuple(reader.specs), dict(axes), tuple(reader.communications))


class Ready:
    """A module in the form in which layouts are carried through it, whatever they are, and what all its flows share.

    `begun` has for each block of it, and for each op there, how many ops stood before it when `_in_order` came to it.
    """

    def __init__(self, module: Any, begun: Sequence[Sequence[int]], seen: Seen, count: int):
        self.module, self.begun, self.seen, self.count = module, begun, seen, count
        self.sharding = functools.cache(_sharding)
        self.with_sharding = functools.cache(_with_sharding)


def as_propagated(module: Any, seen: Seen | None = None) -> Ready:
    """A copy of a module in the form in which layouts are carried through it, whatever they are.

    Args:
      module: the module as JAX lowered it.
      seen: what `read_graph` kept of it, which need not be read again then.
    """
    with module.context, ir.Location.unknown():
        copy = module.operation.clone()
        count = _number(_preorder(copy), 0)
        functions = {_symbol(f): f for f in _functions(copy)}
        body = functions["main"].regions[0].blocks[0]
        _inline(body, functions)
        _as_xla(body, set(body.arguments))
        begun = _in_order(body)
        _number([op for op in _preorder(copy) if _NUMBER not in op.attributes], count)
        _as_one(body, {}, {})
        return Ready(copy, begun, seen or Seen(), count)


def _add_mesh(module: Any, axes: Sequence[tuple[str, int]]) -> None:
    mesh = ", ".join(f'"{name}"={size}' for name, size in axes)
    start = ir.InsertionPoint.at_block_begin(module.regions[0].blocks[0])
    start.insert(ir.Operation.parse(f"sdy.mesh @{GRID} = <[{mesh}]>"))


def _number(ops: Sequence[Any], first: int) -> int:
    """Number ops; gives the next number."""
    kind = ir.IntegerType.get_signless(64)
    for n, op in enumerate(ops, first):
        if op.name not in _UNNUMBERED and not op.name.startswith("sdy."):
            op.attributes[_NUMBER] = ir.IntegerAttr.get(kind, n)
    return first + len(ops)


def grids(module: Any) -> tuple[tuple[int, ...], ...]:
    """Axis sizes of the meshes that stand in a lowered module."""
    return tuple(
        tuple(size for _, size in _mesh_axes(op.operation.attributes["mesh"]))
        for op in module.regions[0].blocks[0].operations
        if op.operation.name == "sdy.mesh"
    )


def _preorder(op: Any) -> list[Any]:
    """An op and all ops inside it, in program order."""
    found = [op]
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                found += _preorder(inner.operation) if len(inner.operation.regions) else [inner.operation]
    return found


def _hold(body: Any, pins: Mapping[int, Pin], ready: Ready) -> None:
    """Constrain operands and results of ops, by number, in a copy of `ready.module`, where `_in_order` would have put the
    constraints: on a result right after its op, on an operand after all that this one and those before it need first."""
    blocks = [[view.operation for view in block.operations] for block in _blocks(body)]
    places = {op: (block, turn) for block, ops in enumerate(blocks) for turn, op in enumerate(ops)}
    held = {op: pins[n] for op in places if (n := _number_of(op)) in pins}
    wanted: list[tuple[int, int, int, int, Spec]] = []
    for op, pin in held.items():
        block, place = places[op]
        turn = begun = ready.begun[block][place]
        for position, (value, spec) in enumerate(zip(op.operands, pin.operands, strict=True)):
            owner = value.owner
            at, done = (-1, -1) if isinstance(owner, ir.Block) else places.get(owner.operation, (-1, -1))
            if at == block and ready.begun[at][done] >= begun:  # computed for this op
                turn = max(turn, done + 1)
            if spec is not None:
                wanted.append((block, turn, -place, position, spec))
    for op, pin in held.items():
        for result, spec in zip(op.results, pin.results, strict=True):
            uses = [(use.owner.operation, use.operand_number) for use in result.uses]
            if spec is not None:
                with ir.InsertionPoint.after(op):
                    new = sdy.ShardingConstraintOp(result, ready.sharding(spec), loc=op.location).result
                for user, number in uses:
                    user.operands[number] = new
    for block, turn, place, position, spec in sorted(wanted):
        op = blocks[block][-place]
        with ir.InsertionPoint(blocks[block][turn]):
            op.operands[position] = sdy.ShardingConstraintOp(
                op.operands[position], ready.sharding(spec), loc=op.location
            ).result


def _as_one(block: Any, made: dict[Any, Any], numbers: dict[Any, Any]) -> None:
    """Give ops of constants, and broadcasts, that make the same one number: Shardy puts them together."""
    for view in block.operations:
        op = view.operation
        for region in op.regions:
            for inner in region.blocks:
                _as_one(inner, made, numbers)
        is_constant = True
        for value in op.operands:
            if value not in made:
                is_constant = False
                break
        if not is_constant and op.name != "stablehlo.broadcast_in_dim":
            continue
        if len(op.regions) or len(op.results) != 1:
            continue
        names = [getattr(a, "name", a) for a in op.attributes]  # JAX 0.10 gives names, 0.12 may give pairs
        attrs = [(name, op.attributes[name]) for name in names if name != _NUMBER]
        key = op.name, op.results[0].type, *attrs, *[made.get(v, v) for v in op.operands]
        number = numbers.setdefault(key, op.attributes[_NUMBER] if _NUMBER in op.attributes else key)
        if _NUMBER in op.attributes:
            op.attributes[_NUMBER] = number
        if is_constant:
            made[op.results[0]] = number


_UNNUMBERED = frozenset({"builtin.module", "func.func", "stablehlo.constant"})
"""Ops that may not have the attribute, and constants, of which Shardy puts equal ones together; it changes its own ops."""


def _number_of(op: Any) -> int:
    return ir.IntegerAttr(op.attributes[_NUMBER]).value if _NUMBER in op.attributes else -1


def _blocks(block: Any) -> Iterator[Any]:
    """A block and those inside it, in the order of `_in_order`."""
    yield block
    for view in block.operations:
        for region in view.operation.regions:
            for inner in region.blocks:
                yield from _blocks(inner)


def _sharding(spec: Spec) -> Any:
    dims = ", ".join("{" + ", ".join(f'"{axis}"' for axis in dim) + "}" for dim in spec)
    return ir.Attribute.parse(f"#sdy.sharding<@{GRID}, [{dims}]>")


def _with_sharding(old: Any, spec: Spec | None) -> Any:
    kept = {named.name: named.attr for named in ir.DictAttr(old)} if old is not None else {}
    kept.pop("sdy.sharding", None)
    if spec is not None:
        kept["sdy.sharding"] = _sharding(spec)
    return ir.DictAttr.get(kept)


# ---- the form in which XLA propagates


def _as_xla(block: Any, arguments: set[Any]) -> None:
    """Bring a block into the form that XLA's own passes give it before it propagates, as far as that decides anything."""
    for view in list(block.operations):
        op = view.operation
        for region in op.regions:
            for inner in region.blocks:
                _as_xla(inner, arguments)
        if op.name == "stablehlo.while":
            _free_invariants(op, arguments)
        elif op.name == "stablehlo.broadcast_in_dim":
            _take_apart(op)
        elif op.name.startswith("chlo."):
            _add_rule(op)


def _inline(block: Any, functions: Mapping[str, Any]) -> None:
    """Put the body of a function in the place of its only call."""
    for view in list(block.operations):
        op = view.operation
        for region in op.regions:
            for inner in region.blocks:
                _inline(inner, functions)
        if op.name != "func.call":
            continue
        function = functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
        body = function.regions[0].blocks[0]
        _inline(body, functions)
        for argument, operand in zip(list(body.arguments), list(op.operands), strict=True):
            argument.replace_all_uses_with(operand)
        *inside, end = [v.operation for v in body.operations]
        for moved in inside:
            moved.move_before(op)
        for result, value in zip(list(op.results), list(end.operands), strict=True):
            result.replace_all_uses_with(value)
        op.erase()
        function.erase()


def _in_order(block: Any) -> list[list[int]]:
    """Order ops as XLA does, depth first from what the block returns: layouts spread in the order of ops.

    Returns for this block, then for those inside it, how many ops stood before each op when it was come to.
    """
    ops = [view.operation for view in block.operations]
    here, end = set(ops), ops[-1]
    feeding = {op: _feeding(op, here) for op in ops}
    order: dict[Any, int] = {}
    for root in (end, *ops):
        stack = [(root, iter(feeding[root]), len(order) - (end in order))] if root not in order else []
        while stack:
            op, rest, begun = stack[-1]
            following = next((f for f in rest if f not in order), None)
            if following is not None:
                stack.append((following, iter(feeding[following]), len(order) - (end in order)))
                continue
            stack.pop()
            order[op] = begun
    order[end] = order.pop(end)  # last
    found = [list(order.values())]
    for op in order:
        if op != end:
            op.move_before(end)
        for region in op.regions:
            for inner in region.blocks:
                found += _in_order(inner)
    return found


def _feeding(op: Any, here: set[Any]) -> list[Any]:
    """Ops among `here` whose results an op reads, itself or in its regions."""
    owners = [value.owner for value in op.operands]
    found = [o.operation for o in owners if not isinstance(o, ir.Block) and o.operation in here]
    for region in op.regions:
        for inner in region.blocks:
            for view in inner.operations:
                found += _feeding(view.operation, here)
    return found


def _free_invariants(loop: Any, arguments: set[Any]) -> None:
    """What every iteration hands on unchanged is read from outside, not carried: the loop may lay it out its own way.

    For an argument of the program, which lies as it was given, that needs an open constraint in between.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    end = body.operations[len(body.operations) - 1].operation
    kept = [i for i, argument in enumerate(body.arguments) if end.operands[i] != argument]
    if not kept or len(kept) == len(loop.operands):
        return
    with ir.InsertionPoint(loop), loop.location:
        new = ir.Operation.create(
            loop.name, [loop.results[i].type for i in kept], [loop.operands[i] for i in kept], regions=2
        )
        for i, value in enumerate(loop.operands):
            if i in kept:
                loop.results[i].replace_all_uses_with(new.results[kept.index(i)])
                continue
            loop.results[i].replace_all_uses_with(value)
            rank = len(_value(value.type).shape)
            if rank and value in arguments:
                open_ = ir.Attribute.parse(f"#sdy.sharding<@{GRID}, [{', '.join(['{?}'] * rank)}]>")
                with ir.InsertionPoint(new):
                    value = sdy.ShardingConstraintOp(value, open_).result
            for inside in (condition, body):
                inside.arguments[i].replace_all_uses_with(value)
    with ir.InsertionPoint(end), end.location:
        ir.Operation.create(end.name, operands=[end.operands[i] for i in kept])
    end.erase()
    for inside, region in ((condition, new.regions[0]), (body, new.regions[1])):
        inside.append_to(region)
        for i in reversed(range(len(loop.operands))):
            if i not in kept:
                region.blocks[0].erase_argument(i)
    loop.erase()


def _take_apart(op: Any) -> None:
    """A broadcast that only adds dims of 1 is a reshape; one that stretches dims of 1 drops them first."""
    source, result = (ir.RankedTensorType(v.type) for v in (op.operands[0], op.results[0]))
    dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
    kept = [i for i, d in enumerate(dims) if source.shape[i] == result.shape[d]]
    with ir.InsertionPoint(op), op.location:
        if dims and math.prod(source.shape) == math.prod(result.shape) and dims == sorted(dims):
            new = ir.Operation.create("stablehlo.reshape", [result], [op.operands[0]])
        elif len(kept) < len(dims):
            small = ir.RankedTensorType.get([source.shape[i] for i in kept], source.element_type)
            dropped = ir.Operation.create("stablehlo.reshape", [small], [op.operands[0]])
            at: dict[str, Any] = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([dims[i] for i in kept])}
            new = ir.Operation.create(op.name, [result], [dropped.result], at)
        else:
            return
    op.results[0].replace_all_uses_with(new.result)
    op.erase()


def _add_rule(op: Any) -> None:
    missing = MISSING_RULES.get(op.name.partition(".")[2])
    rule = missing and missing([_value(o.type) for o in op.operands], [_value(r.type) for r in op.results])
    if rule is not None:
        op.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule_text(rule))


def rule_text(rule: Rule) -> str:
    """A rule as Shardy writes it.

    >>> rule_text(Rule((((0,), (1,)),), (((0,), (2,)),), (8, 64, 4), replicated=frozenset({1, 2})))
    '#sdy.op_sharding_rule<([i, j])->([i, k]) {i=8, j=64, k=4} need_replication={j, k}>'
    """

    def name(factor: int) -> str:
        return "ijklmnopqrstuvwxyz"[factor] if factor < 18 else f"z_{factor - 17}"

    def tensors(all_dims: Sequence[Dims]) -> str:
        return ", ".join("[" + ", ".join("".join(map(name, dim)) for dim in dims) + "]" for dims in all_dims)

    sizes = ", ".join(f"{name(f)}={n}" for f, n in enumerate(rule.sizes))
    needs = f" need_replication={{{', '.join(map(name, sorted(rule.replicated)))}}}" if rule.replicated else ""
    return f"#sdy.op_sharding_rule<({tensors(rule.operands)})->({tensors(rule.results)}) {{{sizes}}}{needs}>"


def _functions(module: Any) -> Iterator[Any]:
    return (op.operation for op in module.regions[0].blocks[0].operations if op.operation.name == "func.func")


def _symbol(op: Any) -> str:
    return ir.StringAttr(op.attributes["sym_name"]).value


class _Fact(NamedTuple):
    """What an op is, however things are laid out; `rest` are the last fields of `Op`, as they stand there."""

    name: str
    rule: Rule | None
    where: str
    unruled: str
    results: tuple[Value, ...]
    rest: tuple[Any, ...]
    made: dict[Any, Op]
    """What it was in graphs so far: flows of one module number most values alike."""


class Seen:
    """What was read before of a module, or of another one with the same ops in it: nothing here depends on layouts.

    Facts are kept by number, and by number and location: ops that Shardy puts together can be at either's place.
    """

    def __init__(self) -> None:
        self.types: dict[Any, Value] = {}
        self.rules: dict[Any, Rule] = {}
        self.lines: dict[Any, str] = {}
        self.laid: dict[Any, tuple[Spec | None, ...]] = {}
        self.facts: dict[Any, _Fact] = {}


class _Unknown(Exception):
    """An op of which nothing was read before, in a module without rules."""


class _Reader:
    """Walks one module once; the lists fill as it goes.

    Args:
      module: the module.
      seen: what was read before of one with the same ops.
      count: how many ops the module had as JAX lowered it; 0 where it has no rules, and all is to be in `seen`.
    """

    def __init__(self, module: Any, seen: Seen | None = None, count: int = 0):
        self.functions = {_symbol(f): f for f in _functions(module)}
        self.meshes = {
            _symbol(op.operation): dict(_mesh_axes(op.operation.attributes["mesh"]))
            for op in module.regions[0].blocks[0].operations
            if op.operation.name == "sdy.mesh"
        }
        self.values: list[Value] = []
        self.specs: list[Spec] = []
        self.ops: list[Op] = []
        self.ties: list[tuple[int, int]] = []
        self.unruled: dict[str, None] = {}
        self.uncounted: dict[str, None] = {}
        self.communications: list[Communication] = []
        self.manual = False
        self.seen = seen or Seen()
        self.count = count

    def graph(self) -> Graph:
        main = self.functions["main"]
        block = main.regions[0].blocks[0]
        arg_attrs = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else None
        env: dict[Any, int] = {}
        for i, argument in enumerate(block.arguments):
            attrs: Any = ir.DictAttr(arg_attrs[i]) if arg_attrs is not None else ()
            sharding = attrs["sdy.sharding"] if "sdy.sharding" in attrs else None
            env[argument] = self.new(argument.type, self.spec(sharding))
        inputs = tuple(env[a] for a in block.arguments)
        outputs = self.walk(block, env, 1)
        if "res_attrs" in main.attributes:
            laid = [ir.DictAttr(attrs) for attrs in main.attributes["res_attrs"]]
            outputs = tuple(
                self.laid_as(v, attrs["sdy.sharding"]) if "sdy.sharding" in attrs else v
                for v, attrs in zip(outputs, laid, strict=True)
            )
        return Graph(
            tuple(self.values), tuple(self.ops), inputs, outputs, tuple(self.ties),
            tuple(self.unruled), tuple(self.uncounted),
        )  # fmt: skip

    def where(self, op: Any) -> str:
        """The user's line of an op; few ops have one of their own, and printing a location takes long."""
        location = op.location.attr
        found = self.seen.lines.get(location)
        if found is None:
            found = self.seen.lines[location] = _where(op)
        return found

    # ---- values

    def new(self, type_: Any, spec: Spec | None) -> int:
        self.values.append(self.value(type_))
        self.specs.append(spec if spec is not None else ((),) * len(self.values[-1].shape))
        return len(self.values) - 1

    def value(self, type_: Any) -> Value:
        found = self.seen.types.get(type_)
        if found is None:
            found = self.seen.types[type_] = _value(type_)
        return found

    def spec(self, attribute: Any) -> Spec | None:
        if attribute is None or self.manual:
            return None
        dims = sdy.TensorShardingAttr(attribute).dimension_shardings
        if not len(dims):  # a scalar, or a host callback, which holds its array on one device
            return None
        return tuple(tuple(_axis(a) for a in sdy.DimensionShardingAttr(d).axes) for d in dims)

    def results(self, op: Any, attrs: Any = None, values: Sequence[Value] | None = None) -> tuple[int, ...]:
        """New values for an op's results, as they are laid out."""
        attrs = op.attributes if attrs is None else attrs
        values = [self.value(r.type) for r in op.results] if values is None else values
        specs: Sequence[Spec | None] = ()
        if self.manual or not len(values):
            pass
        elif "sdy.sharding" in attrs:
            attribute = attrs["sdy.sharding"]
            laid = self.seen.laid
            specs = laid.get(attribute) or laid.setdefault(
                attribute, tuple(self.spec(each) for each in sdy.TensorShardingPerValueAttr(attribute).shardings)
            )
        elif "out_sharding" in attrs:
            specs = (self.spec(attrs["out_sharding"]),)
        elif op.name == "sdy.sharding_constraint" or op.name == "sdy.reshard":
            specs = (self.spec(attrs["sharding"]),)
        first = len(self.values)
        self.values += values
        for i, value in enumerate(values):
            spec = specs[i] if i < len(specs) else None
            self.specs.append(((),) * len(value.shape) if spec is None else spec)
        return tuple(range(first, first + len(values)))

    def laid_as(self, value: int, sharding: Any, trips: int = 1) -> int:
        """The value in a layout of its own: through a reshard, if it lies otherwise."""
        spec = self.spec(sharding)
        if spec is None or spec == self.specs[value]:
            return value
        form = self.values[value]
        self.values.append(form)
        self.specs.append(spec)
        moved = len(self.values) - 1
        self.ops.append(Op("reshard", (value,), (moved,), elementwise_rule([form], [form]), trips, ""))
        return moved

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
            for result, id_ in zip(op.results, ids, strict=True):
                env[result] = id_
        return ()

    def plain(self, op: Any, name: str, env: dict[Any, int], trips: int) -> Sequence[int]:
        attrs = op.attributes
        if name in _NO_OPS:
            return self.results(op, attrs)
        fact = self.known(op, name, attrs) if _NUMBER in attrs else self.fact(op, name, attrs)
        outputs = self.results(op, attrs, fact.results)
        if fact.unruled:
            self.unruled.setdefault(fact.unruled)
        key = trips, outputs[:1], *[env[o] for o in op.operands]
        made = fact.made.get(key)
        if made is None:
            made = Op(fact.name, key[2:], outputs, fact.rule, trips, fact.where, *fact.rest)
            fact.made[key] = made
        self.ops.append(made)
        return outputs

    def known(self, op: Any, name: str, attrs: Any) -> _Fact:
        """What a numbered op is, as it was seen before, here or in the same place."""
        facts, number = self.seen.facts, attrs[_NUMBER]
        at = number, op.location.attr
        found = facts.get(at)
        if found is None:
            if number in facts:
                where, same = self.where(op), facts[number]
                unruled = _at(same.name, where) if same.unruled else ""
                found = same._replace(where=where, unruled=unruled, made={})
            elif self.count:
                found = facts[number] = self.fact(op, name, attrs)
            else:
                raise _Unknown
            facts[at] = found
        return found

    def fact(self, op: Any, name: str, attrs: Any) -> _Fact:
        """What an op is."""
        short = name.split(".", 1)[1] if name.startswith(("stablehlo.", "chlo.", "sdy.")) else name
        if name == "stablehlo.custom_call":
            short = f"custom_call {ir.StringAttr(attrs['call_target_name']).value}"
        where = self.where(op)
        results = tuple([self.value(r.type) for r in op.results])
        rule, unruled = None, ""
        if "sdy.sharding_rule" in attrs:
            attribute, rules = attrs["sdy.sharding_rule"], self.seen.rules
            rule = rules.get(attribute) or rules.setdefault(attribute, _rule(attribute))
        elif (missing := MISSING_RULES.get(short)) is not None:
            rule = missing([self.value(o.type) for o in op.operands], results)
        elif not name.startswith("sdy.") and short not in _NO_RULE_NEEDED:
            unruled = _at(short, where)
        convolution = _convolution(op) if name == "stablehlo.convolution" else None
        number = _number_of(op)
        rest = _reduced(op, name), convolution, _taps(op, short), number if number < self.count else -1
        return _Fact(short, rule, where, unruled, results, rest, {})

    def call(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        block = self.functions[name].regions[0].blocks[0]
        inner = {argument: env[o] for argument, o in zip(block.arguments, op.operands, strict=True)}
        return self.walk(block, inner, trips)

    def loop(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        condition, body = (r.blocks[0] for r in op.regions)
        count = _trip_count(op, condition, body)
        if count is None:
            self.uncounted.setdefault(self.where(op))
        inside = trips * (1 if count is None else count)
        carried = [env[o] for o in op.operands]
        results = self.results(op)
        returned = body.operations[len(body.operations) - 1].operation.operands
        ids = []
        for argument, operand, result, back in zip(body.arguments, carried, results, returned, strict=True):
            if back == argument:  # the same in every iteration: what is gathered of it is gathered once
                ids.append(operand)
            else:
                ids.append(self.new(argument.type, self.specs[result]))
                self.ties.append((operand, ids[-1]))
        self.walk(condition, {**env, **dict(zip(condition.arguments, ids, strict=True))}, inside)
        out = self.walk(body, {**env, **dict(zip(body.arguments, ids, strict=True))}, inside)
        self.ties += [(a, b) for a, b in zip(ids, out, strict=True) if a != b]
        self.ties += list(zip(out, results, strict=True))
        self.ops.append(Op("while", tuple(carried) + out, tuple(results), None, trips, self.where(op)))
        return results

    def branch(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        results = self.results(op)
        returned: tuple[int, ...] = ()
        for region in op.regions:
            out = self.walk(region.blocks[0], dict(env), trips)
            self.ties += list(zip(out, results, strict=True))
            returned += out
        self.ops.append(Op("case", (env[op.operands[0]], *returned), tuple(results), None, trips, self.where(op)))
        return results

    def manual_region(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        """`shard_map`: inside, shapes are already those of one device, and the user wrote the collectives."""
        block = op.regions[0].blocks[0]
        out_specs = [self.spec(s) for s in sdy.TensorShardingPerValueAttr(op.attributes["out_shardings"]).shardings]
        in_shardings = sdy.TensorShardingPerValueAttr(op.attributes["in_shardings"]).shardings
        inputs = tuple(self.laid_as(env[o], s, trips) for o, s in zip(op.operands, in_shardings, strict=True))
        was, self.manual = self.manual, True
        inner = {**env, **{a: self.new(a.type, None) for a in block.arguments}}
        returned = self.walk(block, inner, trips)
        self.manual = was
        outputs = [self.new(r.type, s) for r, s in zip(op.results, out_specs, strict=True)]
        self.ops.append(Op("shard_map", (*inputs, *returned), tuple(outputs), None, trips, self.where(op)))
        return outputs

    def named(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        block = op.regions[0].blocks[0]
        return self.walk(
            block, {**env, **{a: env[o] for a, o in zip(block.arguments, op.operands, strict=True)}}, trips
        )

    def communicate(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        """A collective that the user wrote in a `shard_map`."""
        kind, (axes, size) = op.name.split(".")[1].replace("_", "-"), self.groups(op)
        inputs, outputs = tuple(env[o] for o in op.operands), self.results(op)
        for operand, out in zip(inputs, outputs, strict=False):
            self.communications.append(Communication(kind, axes, size, operand, out, trips, self.where(op), _cause(op)))
        self.ops.append(Op(op.name.split(".")[1], inputs, outputs, None, trips, self.where(op)))
        return outputs

    def groups(self, op: Any) -> tuple[tuple[str, ...], int]:
        """Axes (where the module names them) and group size of a collective that the user wrote in a `shard_map`."""
        attrs = op.attributes
        if "replica_groups" not in attrs:
            pairs = ir.RankedTensorType(attrs["source_target_pairs"].type).shape[0]
            return (), 2 if pairs else 1
        text = str(attrs["replica_groups"])
        named = re.search(r"mesh = @(\w+), axes = (.*)", text)
        if named is None:
            return (), ir.RankedTensorType(attrs["replica_groups"].type).shape[1]
        axes = tuple(_AXIS_REF_NAME.findall(named[2]))
        return axes, math.prod(self.meshes.get(named[1], {}).get(a, 1) for a in axes)


_NO_OPS = frozenset({"stablehlo.constant", "sdy.constant", "sdy.mesh"})
_TERMINATORS = frozenset({"func.return", "stablehlo.return", "sdy.return"})
_NO_RULE_NEEDED = frozenset({"iota", "after_all", "create_token", "partition_id", "replica_id"})
_AXIS_REF_NAME = re.compile(r'name = "([^"]+)"')

_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")

_STRUCTURED = {
    "func.call": _Reader.call,
    "stablehlo.while": _Reader.loop,
    "stablehlo.case": _Reader.branch,
    "stablehlo.if": _Reader.branch,
    "sdy.manual_computation": _Reader.manual_region,
    "sdy.named_computation": _Reader.named,
    **{f"stablehlo.{name}": _Reader.communicate for name in _COLLECTIVES},
}


def _at(name: str, where: str) -> str:
    return f"{name} ({where})" if where else name


def _value(type_: Any) -> Value:
    try:
        tensor = ir.RankedTensorType(type_)
    except ValueError:  # a token
        return Value((), "token")
    return Value(tuple(tensor.shape), str(tensor.element_type))


def _axis(attribute: Any) -> str:
    ref = sdy.AxisRefAttr(attribute)
    if ref.sub_axis_info is None:
        return ref.name
    info = sdy.SubAxisInfoAttr(ref.sub_axis_info)
    return f"{ref.name}:({info.pre_size}){info.size}"


def _mesh_axes(attribute: Any) -> list[tuple[str, int]]:
    return [(m[0], int(m[1])) for m in re.findall(r'"([^"]+)"=(\d+)', str(attribute))]


def _rule(attribute: Any) -> Rule:
    r = sdy.OpShardingRuleAttr(attribute)

    def dims(mapping: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sdy.DimMappingAttr(d).factor_indices) for d in sdy.TensorMappingAttr(mapping).dim_mappings)

    return Rule(
        tuple(dims(m) for m in r.operand_mappings),
        tuple(dims(m) for m in r.result_mappings),
        tuple(r.factor_sizes),
        frozenset(r.reduction_factors),
        frozenset(r.need_replication_factors),
        frozenset(r.permutation_factors),
    )


def _convolution(op: Any) -> Convolution:
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    steps = ("window_strides", "lhs_dilation", "rhs_dilation")
    is_dense = all(
        step == 1 for name in steps if name in op.attributes for step in ir.DenseI64ArrayAttr(op.attributes[name])
    )
    return Convolution(
        tuple(numbers.input_spatial_dimensions),
        tuple(numbers.kernel_spatial_dimensions),
        tuple(numbers.output_spatial_dimensions),
        is_dense,
    )


def _taps(op: Any, name: str) -> tuple[Tap, ...]:
    if name not in WINDOWED:
        return ()
    numbers = {a: list(ir.DenseI64ArrayAttr(op.attributes[a])) for a in ATTRIBUTES if a in op.attributes}
    if "padding" in op.attributes:
        rows = ir.DenseIntElementsAttr(op.attributes["padding"])
        numbers["padding"] = [rows[i] for i in range(len(rows))]
    if name == "convolution":
        d = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        spatial = (d.input_spatial_dimensions, d.kernel_spatial_dimensions, d.output_spatial_dimensions)
        numbers |= {key: list(dims) for key, dims in zip(("image", "kernel", "result"), spatial, strict=True)}
    shapes = [ir.RankedTensorType(v.type).shape for v in (*op.operands, *op.results)]
    return taps(name, numbers, shapes)


def _reduced(op: Any, name: str) -> tuple[tuple[int, int], ...]:
    """(operand, dim) pairs whose sizes multiply the work of each element of the result."""
    if name == "stablehlo.dot_general":
        numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        return tuple((0, d) for d in numbers.lhs_contracting_dimensions)
    if name == "stablehlo.convolution":
        numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        kernel = ir.RankedTensorType(op.operands[1].type)
        return tuple((1, d) for d in range(kernel.rank) if d != numbers.kernel_output_feature_dimension)
    if name == "stablehlo.reduce":
        return tuple((0, int(d)) for d in ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
    return ()


def _cause(op: Any) -> str:
    """The op whose result is communicated, for a reduction; the one that needs it, for the rest."""
    if "reduce" in op.name:
        owner = op.operands[0].owner
        return owner.operation.name.split(".", 1)[-1] if not isinstance(owner, ir.Block) else ""
    return next((use.owner.operation.name.split(".", 1)[-1] for use in op.results[0].uses), "")


_FRAME = re.compile(r'"([^"]+)":(\d+):')
_LIBRARY = re.compile("(site|dist)-packages|^<frozen ")
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEMO = _HERE + "demo.py"  # a user's program that happens to live here


def _where(op: Any) -> str:
    return _frame(str(op.location))


@functools.lru_cache(maxsize=65536)
def _frame(location: str) -> str:
    """`file:line` of the innermost frame that is the user's own, then of any library's, never of this one's."""
    frames = [(file, line) for file, line in _FRAME.findall(location) if not file.startswith(_HERE) or file == _DEMO]
    own = [f for f in frames if not _LIBRARY.search(f[0])]
    file, line = (own or frames or [("", "")])[0]
    return f"{file}:{line}" if file else ""


_DENSE_INT = re.compile(r"dense<(-?\d+)>")


def _constant(value: Any) -> int | None:
    owner = value.owner
    if isinstance(owner, ir.Block) or not owner.operation.name.endswith(".constant"):
        return None
    found = _DENSE_INT.match(str(owner.operation.attributes["value"]))
    return int(found[1]) if found else None


def _trip_count(op: Any, condition: Any, body: Any) -> int | None:
    """Iterations of a `while` that counts from one constant to another, as JAX writes scan and fori_loop."""
    returned = condition.operations[len(condition.operations) - 1].operation.operands[0]
    test = returned.owner
    if isinstance(test, ir.Block) or test.operation.name != "stablehlo.compare":
        return None
    test = test.operation
    if "LT" not in str(test.attributes["comparison_direction"]):
        return None
    counter, limit = test.operands
    if not isinstance(counter.owner, ir.Block):
        return None
    position = ir.BlockArgument(counter).arg_number

    def initial(value: Any) -> int | None:
        if isinstance(value.owner, ir.Block) and value.owner == condition:
            return _constant(op.operands[ir.BlockArgument(value).arg_number])
        return _constant(value)

    start, stop = _constant(op.operands[position]), initial(limit)
    step_op = body.operations[len(body.operations) - 1].operation.operands[position].owner
    if start is None or stop is None or isinstance(step_op, ir.Block) or step_op.operation.name != "stablehlo.add":
        return None
    steps = [c for c in map(_constant, step_op.operation.operands) if c is not None]
    return max(0, -(-(stop - start) // steps[0])) if steps and steps[0] > 0 else None

"""Shardy's passes over a module that JAX lowered: a `Graph` or a `PartitionedProgram` out.

* `read_graph`: Shardy's sharding rule for every op, before any sharding is set;
* `PreparedModule.propagate`: the given shardings propagated to every value; `partition.partitioner` then adds the collectives.

Both work on copies.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardfn.ir.mlir import (
    MESH_NAME,
    NUMBER,
    BlockPath,
    attributes_of,
    blocks_of,
    functions_of,
    ir,
    mesh_axes,
    meshes_of,
    number_all,
    number_of,
    parsed_passes,
    passmanager,
    preorder,
    run_passes,
    sdy,
    symbol_of,
)
from shardfn.ir.model import INNER_AXIS, Axes, Graph, InnerSpec, OpConstraint, Spec
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.ir.propagation_form import (
    drop_identities,
    inline,
    number_duplicates,
    order_depth_first,
    slice_at_constants,
    to_xla_form,
)
from shardfn.ir.reader import Reader, ReaderCache, UnreadOpError

RULES_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"


FLOW_PIPELINE = "builtin.module(sdy-propagation-pipeline)"

_PRIMITIVE = re.compile(r'(?<=["/])[^"/]*(?=")')
"""The name of the primitive in a location: the end of its first path."""

_INNER = re.compile(INNER_AXIS + r"(\d+)")

Place = tuple[int, int]
"""Of an op in the main function: the number of its block, and its position there."""


def flat(module: Any) -> Any:
    """A copy of a lowered module (`jax.stages.Lowered.compiler_ir("stablehlo")`) in which every call has a function of
    its own, so that two callers can shard it differently. XLA's first simplifications are done in it: dynamic slices at constant
    places are slices, and slices and reshapes that change nothing are gone.
    """
    with module.context, ir.Location.unknown():
        copy = module.operation.clone()
        slice_at_constants(preorder(copy))
        drop_identities(preorder(copy))
        run_passes("builtin.module(sdy-flatten-call-graph)", copy)
        return copy


def read_graph(module: Any, seen: ReaderCache | None = None) -> Graph:
    """The ops of a lowered module with Shardy's rules; what is read is kept in `seen` for later propagations."""
    with module.context, ir.Location.unknown():
        copy = module.operation.clone()
        count = number_all(preorder(copy), 0)
        run_passes(RULES_PIPELINE, copy)
        reader = Reader(copy, seen, count)
        graph = reader.graph()
        results = [op.outputs[0] for op in graph.ops if op.name == "sharding_constraint"]
        inner = {v: int(found[1]) for v in results if (found := _INNER.search(str(reader.specs[v])))}
        return dataclasses.replace(graph, inner=inner) if inner else graph


class PreparedModule:
    """A copy of a module in the form that shardings are propagated through, and what all propagations share.

    `begun` has for each block, and for each op in it, how many ops came before it when `order_depth_first` reached it.
    `is_alone`: only the main function is left.

    Args:
      module: the module as JAX lowered it; it is not changed.
      seen: what `read_graph` kept of it.
    """

    def __init__(self, module: Any, seen: ReaderCache | None = None):
        with module.context, ir.Location.unknown():
            self.module, self.seen = module.operation.clone(), seen or ReaderCache()
            self.count = number_all(preorder(self.module), 0)
            functions = {symbol_of(f): f for f in functions_of(self.module)}
            body = functions["main"].regions[0].blocks[0]
            inline(body, functions)
            to_xla_form(body, set(body.arguments))
            self.begun = order_depth_first(body)
            number_all([op for op in preorder(self.module) if NUMBER not in op.attributes], self.count)
            number_duplicates(body, {}, {})
            for op in preorder(self.module):
                if _is_on_any(op):
                    text = re.sub(r"@[^\s,>]+", f"@{MESH_NAME}", str(op.attributes["sharding"]), count=1)
                    op.attributes["sharding"] = ir.Attribute.parse(text)
            self.is_alone = len(list(functions_of(self.module))) == 1
            numbers = collections.Counter(
                op.attributes[NUMBER] for op in preorder(self.module) if NUMBER in op.attributes
            )
        self.alone: dict[Any, Any] = {number: None for number, count in numbers.items() if count == 1}
        self.has_unread_ops = not numbers.keys() <= self.seen.facts.keys()
        self.mesh = functools.cache(_mesh)
        self.sharding = functools.cache(_sharding)
        self.with_sharding = functools.cache(_with_sharding)

    def propagate(
        self,
        axes: Sequence[tuple[str, int]],
        inputs: Sequence[Spec | None],
        outputs: Sequence[Spec | None],
        constraints: Mapping[int, OpConstraint] | None = None,
        inner: Mapping[int, InnerSpec] | None = None,
    ) -> PartitionedProgram:
        """Propagate shardings through the function with Shardy; `partition.partitioner` then adds the collectives.

        Args:
          axes: name and size of each mesh axis, row-major.
          inputs: the sharding of each argument of the module's main function; None leaves it to propagation.
          outputs: the same for its results.
          constraints: the sharding constraints on operands and results of ops, by `Op.site`.
          inner: the shardings of values inside, by the number in their `INNER_AXIS`.
        """
        with self.module.context, ir.Location.unknown():
            copy = self.module.clone()
            main = next(f for f in functions_of(copy) if symbol_of(f) == "main")
            if constraints:
                _hold(main.regions[0].blocks[0], constraints, self)
            if inner:
                _place_inner(main, inner)
            ir.InsertionPoint.at_block_begin(copy.regions[0].blocks[0]).insert(self.mesh(tuple(axes)).clone())
            for attribute, specs in (("arg_attrs", inputs), ("res_attrs", outputs)):
                old = main.attributes[attribute] if attribute in main.attributes else None
                main.attributes[attribute] = ir.ArrayAttr.get(
                    [self.with_sharding(old[i] if old is not None else None, spec) for i, spec in enumerate(specs)]
                )
            copy.verify()
            self.flow.run(copy)
            if self.has_unread_ops:  # the first propagation: their rules are not known from `read_graph`
                run_passes(RULES_PIPELINE, copy)
            reader = Reader(copy, self.seen, self.count if self.has_unread_ops else 0, self.alone)
            try:
                graph = reader.graph()
            except UnreadOpError:  # an op that the first propagation's module did not have
                self.has_unread_ops = True
                return self.propagate(axes, inputs, outputs, constraints, inner)
            self.has_unread_ops = False
            return PartitionedProgram(graph, tuple(reader.specs), dict(axes), tuple(reader.communications))

    @functools.cached_property
    def flow(self) -> Any:
        """The passes of a propagation; parsing them and setting them up takes as long as a small function's propagation."""
        return parsed_passes(_flow_pipeline() if self.is_alone else FLOW_PIPELINE)

    @functools.cached_property
    def blocks(self) -> list[tuple[BlockPath, list[Any]]]:
        """Of each block of the main function, the way to it and its ops, in the order of `order_depth_first`."""
        main = next(f for f in functions_of(self.module) if symbol_of(f) == "main")
        return [
            (path, [view.operation for view in block.operations])
            for path, block in blocks_of(main.regions[0].blocks[0])
        ]

    @functools.cached_property
    def place_of(self) -> dict[Any, Place]:
        """The place of each op."""
        return {op: (block, turn) for block, (_, ops) in enumerate(self.blocks) for turn, op in enumerate(ops)}

    @functools.cached_property
    def places(self) -> dict[int, list[Place]]:
        """By number, the places of an op."""
        found: dict[int, list[Place]] = {}
        for op, place in self.place_of.items():
            found.setdefault(number_of(op), []).append(place)
        found.pop(-1, None)
        return found

    def operand_places(self, place: Place) -> list[Place]:
        """The places of the ops that make the operands of an op; (-1, -1) of what is no op's."""
        block, turn = place
        owners = [value.owner for value in self.blocks[block][1][turn].operands]
        return [(-1, -1) if isinstance(o, ir.Block) else self.place_of.get(o.operation, (-1, -1)) for o in owners]

    def block_at(self, body: Any, block: int) -> Any:
        """The block of a number in a copy of the main function's body."""
        for at, region, inner in self.blocks[block][0]:
            body = body.operations[at].operation.regions[region].blocks[inner]
        return body


@functools.cache
def _flow_pipeline() -> str:
    """`FLOW_PIPELINE` spelled out, without the passes that look for functions nobody calls: a tenth of its time."""
    spelled = str(passmanager.PassManager.parse(FLOW_PIPELINE))
    kept = re.sub(r"(?<=[(,])(symbol-dce|sdy-save-module),", "", spelled)
    try:
        passmanager.PassManager.parse(kept)
    except ValueError:  # a pass of this JAX that has no name of its own
        return FLOW_PIPELINE
    return kept


def _mesh(axes: Axes) -> Any:
    mesh = ", ".join(f'"{name}"={size}' for name, size in axes)
    return ir.Operation.parse(f"sdy.mesh @{MESH_NAME} = <[{mesh}]>")


def used_meshes(module: Any) -> tuple[Axes, ...]:
    """The meshes of a lowered module that shardings use."""
    meshes = meshes_of(module)
    every = [
        op for op in preorder(module.operation) if meshes and not (_is_on_any(op) or op.name == "stablehlo.constant")
    ]
    used = {name for op in every for _, a in attributes_of(op) for name in re.findall(r"@([^\s,>]+)", str(a))}
    return tuple(tuple(mesh_axes(op.attributes["mesh"])) for op in meshes if symbol_of(op) in used)


def _is_on_any(op: Any) -> bool:
    """Whether an op is a sharding constraint without axes, which means the same on every mesh."""
    return op.name == "sdy.sharding_constraint" and '"' not in str(op.attributes["sharding"])


def _hold(body: Any, constraints: Mapping[int, OpConstraint], ready: PreparedModule) -> None:
    """Add sharding constraints to ops, by number, in a copy of `ready.module`: on a result right after its op, on an
    operand after everything that this operand and those before it need.
    """
    held = sorted((place, n) for n in constraints for place in ready.places.get(n, ()))
    ops_of = functools.cache(lambda block: list(ready.block_at(body, block).operations))

    def op_at(place: Place) -> Any:
        block, turn = place
        return ops_of(block)[turn].operation

    wanted: list[tuple[Place, int, int, Spec]] = []
    """Before which op, for which one, counted backwards, its operand, and the operand's sharding."""
    for place, n in held:
        block, own = place
        turn = begun = ready.begun[block][own]
        for position, (made_at, spec) in enumerate(
            zip(ready.operand_places(place), constraints[n].operands, strict=True)
        ):
            at, done = made_at
            if at == block and ready.begun[at][done] >= begun:  # computed for this op
                turn = max(turn, done + 1)
            if spec is not None:
                wanted.append(((block, turn), -own, position, spec))
    for block in {block for (block, _), *_ in wanted} | {block for (block, _), _ in held}:
        ops_of(block)  # before any is added
    for place, n in held:
        op = op_at(place)
        for made, spec in zip(op.results, constraints[n].results, strict=True):
            last, result = _returned(op, made)
            uses = [(use.owner.operation, use.operand_number) for use in result.uses]
            if spec is not None:
                with ir.InsertionPoint.after(last):
                    new = sdy.ShardingConstraintOp(result, ready.sharding(spec), loc=op.location).result
                for user, number in uses:
                    user.operands[number] = new
    for place, backwards, position, spec in sorted(wanted):
        op = op_at((place[0], -backwards))
        with ir.InsertionPoint(op_at(place)):
            op.operands[position] = sdy.ShardingConstraintOp(
                op.operands[position], ready.sharding(spec), loc=op.location
            ).result


def _returned(op: Any, result: Any) -> tuple[Any, Any]:
    """The op that makes what a jaxpr's equation returns for a result of its op, and that value.

    JAX lowers some equations, such as a gather that fills rows out of bounds, to an op and a `select` of its result: their
    locations differ in the name of the primitive alone.
    """
    users = [use.owner.operation for use in result.uses]
    if len(users) == 1 and users[0].name == "stablehlo.select":
        of_user, own = (_PRIMITIVE.sub("", str(of.location), count=1) for of in (users[0], op))
        if of_user == own:
            return users[0], users[0].results[0]
    return op, result


def _place_inner(main: Any, inner: Mapping[int, InnerSpec]) -> None:
    """Write the shardings of values inside into the sharding constraints that stand for them."""
    for op in preorder(main):
        if op.name == "sdy.sharding_constraint" and (found := _INNER.search(str(op.attributes["sharding"]))):
            op.attributes["sharding"] = _sharding(inner[int(found[1])])


def _sharding(spec: InnerSpec) -> Any:
    closed = (() if dim is None else dim for dim in spec)
    texts = [", ".join(f'"{axis}"' for axis in dim) for dim in closed]
    dims = ", ".join("{?}" if dim is None else "{" + text + "}" for dim, text in zip(spec, texts, strict=True))
    return ir.Attribute.parse(f"#sdy.sharding<@{MESH_NAME}, [{dims}]>")


def _with_sharding(old: Any, spec: Spec | None) -> Any:
    kept = {named.name: named.attr for named in ir.DictAttr(old)} if old is not None else {}
    kept.pop("sdy.sharding", None)
    if spec is not None:
        kept["sdy.sharding"] = _sharding(spec)
    return ir.DictAttr.get(kept)

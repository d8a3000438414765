"""The one user of `jax.extend.mlir`: a lowered module in, a `Graph` or a `Flow` out.

Two passes over a copy of the module that JAX lowered:

* `read_graph`: Shardy's rule for every op, before anything is placed;
* `propagate`: the given layouts carried through every value, and the collectives that this implies.

Calls are read in place, once for each call site, so that two callers of one function stay two.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

from shardfn.graph.model import Communication, Convolution, Flow, Graph, Op, Rule, Spec, Value
from shardfn.graph.rules import MISSING_RULES

GRID = "grid"  # the name of our mesh inside the module

RULES_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
FLOW_PIPELINE = (
    "builtin.module(sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives))"
)


def read_graph(module: Any) -> Graph:
    """The ops of a lowered module (`jax.stages.Lowered.compiler_ir("stablehlo")`) with Shardy's rules."""
    with module.context, ir.Location.unknown():
        copy = module.operation.clone()
        passmanager.PassManager.parse(RULES_PIPELINE).run(copy)
        reader = _Reader(copy)
        return reader.graph()


def propagate(
    module: Any,
    axes: Sequence[tuple[str, int]],
    inputs: Sequence[Spec | None],
    outputs: Sequence[Spec | None],
) -> Flow:
    """Carry layouts through the function with Shardy and read what lies where and what is communicated.

    Args:
      module: the module as JAX lowered it; it is not changed.
      axes: the grid, as (name, size) in row-major order.
      inputs: the layout of every argument of the module's main function; None leaves it to propagation.
      outputs: the same for its results.
    """
    with module.context, ir.Location.unknown():
        copy = module.operation.clone()
        block = copy.regions[0].blocks[0]
        mesh = ", ".join(f'"{name}"={size}' for name, size in axes)
        ir.InsertionPoint.at_block_begin(block).insert(ir.Operation.parse(f"sdy.mesh @{GRID} = <[{mesh}]>"))
        main = next(f for f in _functions(copy) if _symbol(f) == "main")
        for attribute, specs in (("arg_attrs", inputs), ("res_attrs", outputs)):
            old = main.attributes[attribute] if attribute in main.attributes else None
            main.attributes[attribute] = ir.ArrayAttr.get(
                [_with_sharding(old[i] if old is not None else None, spec) for i, spec in enumerate(specs)]
            )
        passmanager.PassManager.parse(FLOW_PIPELINE).run(copy)
        reader = _Reader(copy)
        graph = reader.graph()
        return Flow(graph, tuple(reader.specs), dict(axes), tuple(reader.communications))


def grids(module: Any) -> tuple[tuple[int, ...], ...]:
    """Axis sizes of the meshes that stand in a lowered module."""
    return tuple(
        tuple(size for _, size in _mesh_axes(op.operation.attributes["mesh"]))
        for op in module.body.operations
        if op.operation.name == "sdy.mesh"
    )


def _with_sharding(old: Any, spec: Spec | None) -> Any:
    kept = {named.name: named.attr for named in ir.DictAttr(old)} if old is not None else {}
    kept.pop("sdy.sharding", None)
    if spec is not None:
        dims = ", ".join("{" + ", ".join(f'"{axis}"' for axis in dim) + "}" for dim in spec)
        kept["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding<@{GRID}, [{dims}]>")
    return ir.DictAttr.get(kept)


def _functions(module: Any) -> Iterator[Any]:
    return (op.operation for op in module.regions[0].blocks[0].operations if op.operation.name == "func.func")


def _symbol(op: Any) -> str:
    return ir.StringAttr(op.attributes["sym_name"]).value


class _Reader:
    """Walks one module once; the lists fill as it goes."""

    def __init__(self, module: Any):
        self.functions = {_symbol(f): f for f in _functions(module)}
        self.meshes = {
            _symbol(op.operation): dict(_mesh_axes(op.operation.attributes["mesh"]))
            for op in module.regions[0].blocks[0].operations
            if op.operation.name == "sdy.mesh"
        }
        self.values: list[Value] = []
        self.specs: list[Spec] = []
        self.trips_of: list[int] = []
        self.ops: list[Op] = []
        self.ties: list[tuple[int, int]] = []
        self.unruled: dict[str, None] = {}
        self.uncounted: dict[str, None] = {}
        self.communications: list[Communication] = []
        self.sent: dict[tuple[Any, ...], int] = {}
        self.types: dict[Any, Value] = {}
        self.rules: dict[Any, Rule] = {}
        self.manual = False

    def graph(self) -> Graph:
        main = self.functions["main"]
        block = main.regions[0].blocks[0]
        arg_attrs = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else None
        env: dict[Any, int] = {}
        for i, argument in enumerate(block.arguments):
            attrs: Any = ir.DictAttr(arg_attrs[i]) if arg_attrs is not None else ()
            sharding = attrs["sdy.sharding"] if "sdy.sharding" in attrs else None
            env[argument] = self.new(argument.type, self.spec(sharding, argument.type), 1)
        inputs = tuple(env[a] for a in block.arguments)
        outputs = self.walk(block, env, 1)
        return Graph(
            tuple(self.values), tuple(self.ops), inputs, outputs, tuple(self.ties),
            tuple(self.unruled), tuple(self.uncounted),
        )  # fmt: skip

    # ---- values

    def new(self, type_: Any, spec: Spec | None, trips: int) -> int:
        value = self.types.get(type_)
        if value is None:
            value = self.types[type_] = _value(type_)
        self.values.append(value)
        self.specs.append(spec if spec is not None else ((),) * len(value.shape))
        self.trips_of.append(trips)
        return len(self.values) - 1

    def spec(self, attribute: Any, type_: Any) -> Spec | None:
        if attribute is None or self.manual:
            return None
        dims = sdy.TensorShardingAttr(attribute).dimension_shardings
        if not len(dims):  # a scalar, or a host callback, which holds its array on one device
            return None
        return tuple(tuple(_axis(a) for a in sdy.DimensionShardingAttr(d).axes) for d in dims)

    def results(self, op: Any, trips: int) -> list[int]:
        shardings: Any = ()
        if "sdy.sharding" in op.attributes and len(op.results):
            shardings = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"]).shardings
        elif "out_sharding" in op.attributes:
            shardings = [op.attributes["out_sharding"]]
        elif op.name == "sdy.sharding_constraint" or op.name == "sdy.reshard":
            shardings = [op.attributes["sharding"]]
        return [
            self.new(r.type, self.spec(shardings[i] if i < len(shardings) else None, r.type), trips)
            for i, r in enumerate(op.results)
        ]

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
        inputs = tuple(env[o] for o in op.operands)
        outputs = tuple(self.results(op, trips))
        short = name.split(".", 1)[1] if name.startswith(("stablehlo.", "chlo.", "sdy.")) else name
        if name == "stablehlo.custom_call":
            short = f"custom_call {ir.StringAttr(op.attributes['call_target_name']).value}"
        if short == "constant" or name == "sdy.mesh":
            return outputs
        attrs = op.attributes
        where = _where(op)
        rule = None
        if "sdy.sharding_rule" in attrs:
            attribute = attrs["sdy.sharding_rule"]
            rule = self.rules.get(attribute) or self.rules.setdefault(attribute, _rule(attribute))
        elif (missing := MISSING_RULES.get(short)) is not None:
            rule = missing([self.values[i] for i in inputs], [self.values[o] for o in outputs])
        elif not name.startswith("sdy.") and short not in _NO_RULE_NEEDED:
            self.unruled.setdefault(f"{short} ({where})" if where else short)
        convolution = _convolution(op) if name == "stablehlo.convolution" else None
        reduced = _reduced(op, name)
        self.ops.append(Op(short, inputs, outputs, rule, trips, where, reduced, convolution=convolution))
        return outputs

    def call(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
        block = self.functions[name].regions[0].blocks[0]
        inner = {argument: env[o] for argument, o in zip(block.arguments, op.operands, strict=True)}
        return self.walk(block, inner, trips)

    def loop(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        condition, body = (r.blocks[0] for r in op.regions)
        count = _trip_count(op, condition, body)
        if count is None:
            self.uncounted.setdefault(_where(op))
        inside = trips * (1 if count is None else count)
        carried = [env[o] for o in op.operands]
        results = self.results(op, trips)
        returned = body.operations[len(body.operations) - 1].operation.operands
        ids = []
        for argument, operand, result, back in zip(body.arguments, carried, results, returned, strict=True):
            if back == argument:  # the same in every iteration: what is gathered of it is gathered once
                ids.append(operand)
            else:
                ids.append(self.new(argument.type, self.specs[result], inside))
                self.ties.append((operand, ids[-1]))
        self.walk(condition, {**env, **dict(zip(condition.arguments, ids, strict=True))}, inside)
        out = self.walk(body, {**env, **dict(zip(body.arguments, ids, strict=True))}, inside)
        self.ties += [(a, b) for a, b in zip(ids, out, strict=True) if a != b]
        self.ties += list(zip(out, results, strict=True))
        self.ops.append(Op("while", tuple(carried) + out, tuple(results), None, trips, _where(op)))
        return results

    def branch(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        results = self.results(op, trips)
        returned: tuple[int, ...] = ()
        for region in op.regions:
            out = self.walk(region.blocks[0], dict(env), trips)
            self.ties += list(zip(out, results, strict=True))
            returned += out
        self.ops.append(Op("case", (env[op.operands[0]], *returned), tuple(results), None, trips, _where(op)))
        return results

    def manual_region(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        """`shard_map`: inside, shapes are already those of one device, and the user wrote the collectives."""
        block = op.regions[0].blocks[0]
        out_specs = [
            self.spec(s, None) for s in sdy.TensorShardingPerValueAttr(op.attributes["out_shardings"]).shardings
        ]
        was, self.manual = self.manual, True
        inner = {**env, **{a: self.new(a.type, None, trips) for a in block.arguments}}
        self.walk(block, inner, trips)
        self.manual = was
        outputs = [self.new(r.type, s, trips) for r, s in zip(op.results, out_specs, strict=True)]
        self.ops.append(Op("shard_map", tuple(env[o] for o in op.operands), tuple(outputs), None, trips, _where(op)))
        return outputs

    def named(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        block = op.regions[0].blocks[0]
        return self.walk(
            block, {**env, **{a: env[o] for a, o in zip(block.arguments, op.operands, strict=True)}}, trips
        )

    def communicate(self, op: Any, env: dict[Any, int], trips: int) -> Sequence[int]:
        kind, attribute = _COLLECTIVES[op.name]
        outputs = self.results(op, trips)
        operand = env[op.operands[0]]
        if attribute is None:
            axes, sizes = self.groups(op)
        else:
            refs = _AXIS_REF.findall(str(op.attributes[attribute])) if attribute else ()
            mesh = self.mesh_of(op)
            axes = tuple(name for name, _ in refs)
            sizes = math.prod(int(sub) if sub else mesh.get(name, 1) for name, sub in refs)
        if kind == "collective-permute" and attribute is not None:
            moved = {a for dim in self.specs[operand] for a in dim} | {a for dim in self.specs[outputs[0]] for a in dim}
            axes, sizes = tuple(sorted(moved)), 2
        # XLA merges equal collectives of one value, and lifts what does not change out of a loop.
        key = (op.name, operand, str(op.attributes[attribute]) if attribute else None, str(self.specs[outputs[0]]))
        if not self.manual and key in self.sent:
            return [self.sent[key]]
        self.sent[key] = outputs[0]
        trips = trips if self.manual else min(trips, self.trips_of[operand])
        if kind:
            cause = _cause(op)
            for o, out in zip(op.operands, outputs, strict=False):
                self.communications.append(
                    Communication(kind, axes, sizes, env[o], out, trips, _line(op), cause)
                )  # fmt: skip
        self.trips_of[outputs[0]] = trips
        self.ops.append(Op(op.name.split(".")[1], (operand,), tuple(outputs), None, trips, _line(op)))
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

    def mesh_of(self, op: Any) -> Mapping[str, int]:
        if "out_sharding" in op.attributes:
            ref = str(sdy.TensorShardingAttr(op.attributes["out_sharding"]).mesh_or_ref).lstrip("@").strip('"')
            return self.meshes.get(ref, self.meshes.get(GRID, {}))
        return self.meshes.get(GRID, {})


_TERMINATORS = frozenset({"func.return", "stablehlo.return", "sdy.return"})
_NO_RULE_NEEDED = frozenset({"iota", "after_all", "create_token", "partition_id", "replica_id"})
_AXIS_REF_NAME = re.compile(r'name = "([^"]+)"')
_AXIS_REF = re.compile(r'"([^"]+)"(?::\(\d+\)(\d+))?')

_COLLECTIVES: dict[str, tuple[str, str | None]] = {
    # op: (kind or "" where nothing is sent, attribute that names the axes or None where it lists device groups)
    "sdy.all_gather": ("all-gather", "gathering_axes"),
    "sdy.all_reduce": ("all-reduce", "reduction_axes"),
    "sdy.reduce_scatter": ("reduce-scatter", "reduce_scatter_axes"),
    "sdy.all_to_all": ("all-to-all", "params"),
    "sdy.collective_permute": ("collective-permute", "out_sharding"),
    "sdy.all_slice": ("", "slicing_axes"),
    "stablehlo.all_gather": ("all-gather", None),
    "stablehlo.all_reduce": ("all-reduce", None),
    "stablehlo.reduce_scatter": ("reduce-scatter", None),
    "stablehlo.all_to_all": ("all-to-all", None),
    "stablehlo.collective_permute": ("collective-permute", None),
}

_STRUCTURED = {
    "func.call": _Reader.call,
    "stablehlo.while": _Reader.loop,
    "stablehlo.case": _Reader.branch,
    "stablehlo.if": _Reader.branch,
    "sdy.manual_computation": _Reader.manual_region,
    "sdy.named_computation": _Reader.named,
    **dict.fromkeys(_COLLECTIVES, _Reader.communicate),
}


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


def _line(op: Any) -> str:
    """The user's line of a collective: its own, or, where Shardy put it in, that of the first op that reads it."""
    readers = (use.owner.operation for use in op.results[0].uses)
    return _where(op) or next(filter(None, map(_where, readers)), "")


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

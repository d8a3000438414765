"""A plan as plain JAX: the code of a mesh, `PartitionSpec`s, sharding constraints by source line, and a `jax.jit`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import json
import keyword
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.sharding import Mesh

from shardfn.errors import with_article
from shardfn.frontend.static_leaves import without_static
from shardfn.frontend.strategy import count
from shardfn.ir.model import Spec, mesh_sizes
from shardfn.ir.rewrite import equations
from shardfn.ir.source_lines import file_line
from shardfn.planning.call import TracedCall
from shardfn.planning.plan import plain_nnx
from shardfn.planning.plan.plan import Decision, Plan, answered_call

WIDTH = 100
"""The most characters of a line, where a container can be broken into its elements."""


def code(plan: Plan) -> str:
    """`Plan.code`."""
    call, objects = answered_call(plan).posed.call, plain_nnx.object_arguments(plan)
    try:
        return _code(plan, call, objects)
    except _NotWritten:
        return _code(plan, call, ())


def _code(plan: Plan, call: TracedCall, objects: Collection[int]) -> str:
    """`code`, in which some of the dynamic arguments are, or hold, Flax NNX objects.

    Raises:
      _NotWritten: an object cannot be written.
    """
    function, names = call.function.call, _parameters(plan, bool(objects))
    name = plan.function if _is_name(plan.function) else "f"
    placed = functools.partial(_with_objects, plan, objects)
    arguments, modules = _specs(function.dynamic, plan.inputs, names, placed)
    jax_or_nnx = "nnx" if objects else "jax"
    made = f"{jax_or_nnx}.eval_shape({_called(plan, name, bool(objects))}, {', '.join(names)})"
    results, decided, unlike = call.traced.results, plan.outputs, iter(())
    if objects:
        results, decided, unlike = plain_nnx.results(plan, results)
    (result,), more = _specs((results,), decided, [made])
    options: dict[str, Any] = {
        "donate_argnums": call.function.donate_argnums,
        "static_argnums": function.statics,
        "compiler_options": dict(call.compiler_options or {}) if not objects else {},
    }
    jit = ["in_shardings=in_shardings", "out_shardings=out_shardings"]
    jit += [f"{option}={value!r}" for option, value in options.items() if value]
    inside, mesh = list(_constraints(plan)), _mesh(plan)
    lines = [
        f"# {plan.function}: {plan.kind}, as planned by shardfn",
        *(f"# {line}" for line in (*_cautions(plan, name, objects), *unlike)),
        *(f"# {line}" for line in _ours(plan, name, {*modules, *more})),
        *(f"import {module}" for module in sorted({"jax", *["numpy as np"] * ("np." in mesh), *modules, *more})),
        *["from flax import nnx"] * bool(objects),
        "from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P",
        "",
        mesh,
        "",
        *(["# Sharding constraints inside the function, by source line", *inside, ""] if inside else []),
        *_wrapper(plan, name, bool(objects)),
        f"in_specs = {_text(_Node('(', tuple(arguments), ',)' if len(arguments) == 1 else ')'))}",
        f"out_specs = {_text(result)}",
        *(["", "", plain_nnx.NAMED] if objects else [NAMED]),
        _text(_Node(f"sharded = {jax_or_nnx}.jit(", tuple(map(_Node, [_called(plan, name, bool(objects)), *jit])), ")")),
    ]  # fmt: skip
    return "\n".join(lines)


NAMED = """
in_shardings, out_shardings = jax.tree.map(
    lambda s: s if isinstance(s, NamedSharding) else NamedSharding(mesh, s), (in_specs, out_specs)
)
""".strip()
"""The shardings of specs."""


def _cautions(plan: Plan, name: str, objects: Collection[int]) -> Iterator[str]:
    """What `plan.apply` does and this code does not; and what stands in it for objects."""
    call = answered_call(plan).posed.call
    constraints = [c.where for c in plan.constraints for spec in (*c.operands, *c.results) if spec is not None]
    if constraints:
        bare = sum(not where for where in constraints)
        are, them = ("constraint is", "it") if len(constraints) == 1 else ("constraints are", "them")
        yield f"{len(constraints)} {are} NOT applied below; plan.apply({name}) applies {them}."
        yield (
            f"Without {them} XLA makes another program. Write {them} into the function, at the lines that the comments give"
            + (f"; {bare} {'has' if bare == 1 else 'have'} none." if bare else ".")
        )
    function, held = call.function, call.function.callee.objects.nodes
    if objects:
        yield "nnx.jit takes Flax NNX objects themselves, and puts the arrays into them that the call changes."
        if call.compiler_options:
            yield f"It takes no compiler_options: set these for the process, in XLA_FLAGS: {dict(call.compiler_options)}"
    elif function.call.stateful:
        yield f"`{name}` takes the arrays of its object first, as a dict by path, and returns its result and a dict of the arrays"
        yield "that it changes. plan.apply makes such a function of the object."
    elif held:
        yield f"`{name}` takes nested dicts of arrays in the place of the objects {', '.join(held)}, and returns its result and"
        yield "a dict of the arrays that it changes. plan.apply makes such a function."
    if function.wrong:
        ops = count(len(function.wrong), "op", "ops")
        yield f"XLA computes {ops} of this plan wrongly. plan.apply works around that; this code does not."
    if function.shifted is not None and not function.is_as_written:
        yield "plan.apply also sends halos where rows move along a sharded dimension. XLA may gather the rows here."
    if plan.detours:
        yield f"plan.apply also gathers {count(len(plan.detours), 'array', 'arrays')} in the place of all-to-alls."


def _ours(plan: Plan, name: str, modules: Collection[str]) -> Iterator[str]:
    """What the code takes from this library."""
    if any(module.partition(".")[0] == "shardfn" for module in modules):
        names = ", ".join(_parameters(plan))
        yield f"The state is a class of shardfn. Without shardfn, define your own with the same fields, and `{name}({names})`,"
        yield "which returns the new state and the loss."


# ---- the function


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _parameters(plan: Plan, with_objects: bool = False, with_static: bool = False) -> list[str]:
    """The names of the arguments of the jitted function, in order."""
    call = answered_call(plan).posed.call.function.call
    slots = [slot.name for slot in call.slots if with_static or not slot.is_static]
    names = [*[plain_nnx.object_name(plan) if with_objects else "arrays"] * call.stateful, *slots]
    return [name if _is_name(name) else f"argument_{i}" for i, name in enumerate(names)]


def _is_wrapped(plan: Plan, with_objects: bool) -> bool:
    call = answered_call(plan).posed.call.function.call
    return any(slot.keyword is not None for slot in call.slots) or (with_objects and call.stateful)


def _called(plan: Plan, name: str, with_objects: bool) -> str:
    """The name of the function that takes all arguments by position, and the object that it is called of."""
    return "by_position" if _is_wrapped(plan, with_objects) else name


def _wrapper(plan: Plan, name: str, with_objects: bool) -> list[str]:
    """A function that takes all arguments by position: `jax.jit` gives shardings to no others."""
    if not _is_wrapped(plan, with_objects):
        return []
    call, names = answered_call(plan).posed.call.function.call, _parameters(plan, with_objects, with_static=True)
    slots = [None] * call.stateful + [slot.keyword for slot in call.slots]
    given = [own if by is None else f"{by}={own}" for own, by in zip(names, slots, strict=True)]
    if with_objects and call.stateful:
        name, given = plain_nnx.called(plan), given[1:]
    return [f"def by_position({', '.join(names)}):", f"    return {name}({', '.join(given)})", "", ""]


# ---- the mesh


def _mesh(plan: Plan) -> str:
    axes = plan.axes or (("a", 1),)
    names, sizes = _quoted([name for name, _ in axes]), mesh_sizes(axes)
    types = f"axis_types=(AxisType.Auto,) * {len(axes)}"
    order = _order(plan)
    if order is None:
        return f"mesh = jax.make_mesh({sizes}, {names}, {types})"
    devices = f"jax.devices()[:{len(order)}]"
    if order != list(range(len(order))):
        devices = f"[jax.devices()[i] for i in {order}]"
    return f"mesh = Mesh(np.array({devices}).reshape{sizes}, {names}, {types})"


def _order(plan: Plan) -> list[int] | None:
    """The device at each position of the mesh; None where JAX orders TPUs along their torus."""
    if plan.hardware.platform == "tpu" and plan.order is None and plan.hardware.mesh is None:
        return None
    mesh = plan.mesh
    if not isinstance(mesh, Mesh):
        return list(plan.order or range(plan.hardware.count))
    every = jax.devices(mesh.devices.flat[0].platform)
    return [every.index(device) for device in mesh.devices.flat]


def _quoted(names: Sequence[str]) -> str:
    """A tuple of strings.

    >>> _quoted(["a"]), _quoted(["a", "b"])
    ('("a",)', '("a", "b")')
    """
    return f"({', '.join(map(json.dumps, names))}{',' * (len(names) == 1)})"


# ---- specs


def spec_code(spec: Spec) -> str:
    """A `PartitionSpec` as code.

    >>> spec_code((("a",), (), ("b", "c"))), spec_code(((), ()))
    ('P("a", None, ("b", "c"))', 'P()')
    """
    dims = [json.dumps(dim[0]) if len(dim) == 1 else _quoted(dim) if dim else "None" for dim in spec]
    return f"P({', '.join(dims if any(spec) else [])})"


@dataclasses.dataclass(frozen=True)
class _Node:
    """An expression as code: a leaf is its `begin` alone. `label` stands before it, as a key or the name of a field."""

    begin: str
    parts: tuple[_Node, ...] = ()
    end: str = ""
    label: str = ""
    comment: str = ""


class _NotWritten(Exception):
    """An object has no form as code."""


def _with_objects(plan: Plan, objects: Collection[int], i: int, tree: Any) -> Any:
    """An argument, with `_Node`s as leaves, with one in the place of each Flax NNX object."""
    if i not in objects:
        return tree

    def write(values: dict[Any, Any]) -> _Node:
        node = _written(values, set())
        assert node is not None
        return _Node("nnx.StateSharding(nnx.State(", (node,), "))")

    if (found := plain_nnx.with_objects(plan, i, tree, write)) is None or _written(found, set()) is None:
        raise _NotWritten
    return found


def _specs(
    trees: Sequence[Any],
    decisions: Sequence[Decision],
    names: Sequence[str],
    placed: Callable[[int, Any], Any] = lambda i, tree: tree,
) -> tuple[list[_Node], set[str]]:
    """The code of the specs in the structure of each tree, and the modules that it uses.

    Args:
      trees: the arguments, or the result.
      decisions: the decisions on their leaves, in order.
      names: an expression for each tree, for classes that cannot be written as code.
      placed: what is written in the place of each tree of `_Node`s, by its number.
    """
    found, modules, first = list[_Node](), set[str](), 0
    for i, (tree, name) in enumerate(zip(trees, names, strict=True)):
        treedef = tree_util.tree_structure(tree)
        own = decisions[first : first + treedef.num_leaves]
        first += treedef.num_leaves
        leaves = [_Node(_sharding(d), comment=d.path) for d in own]
        used = set[str]()
        node = _written(placed(i, without_static(treedef.unflatten(leaves))), used)
        if node is None:
            structure = f"jax.tree.structure({name})"
            node, used = _Node(f"jax.tree.unflatten({structure}, [", tuple(leaves), "])"), set()
        found.append(node)
        modules |= used
    return found, modules


def _sharding(d: Decision) -> str:
    if d.memory_kind is None:
        return spec_code(d.spec)
    return f"NamedSharding(mesh, {spec_code(d.spec)}, memory_kind={json.dumps(d.memory_kind)})"


def _written(tree: Any, modules: set[str]) -> _Node | None:
    """A pytree with `_Node`s as leaves as code; None for an object whose class cannot be written."""
    if isinstance(tree, _Node):
        return dataclasses.replace(tree, comment="")
    if tree is None:
        return _Node("None")
    if type(tree) in (tuple, list, dict):
        rows = tree.items() if type(tree) is dict else [("", part) for part in tree]
        parts = [(json.dumps(key) if isinstance(key, str) else repr(key), part) for key, part in rows]
        begin, end = {tuple: ("(", ",)" if len(tree) == 1 else ")"), list: ("[", "]"), dict: ("{", "}")}[type(tree)]
        label = "{}: " if type(tree) is dict else ""
    elif (fields := getattr(tree, "_fields", None)) is not None and (cls := _class_code(type(tree), modules)):
        parts, label = list(zip(fields, tree, strict=True)), "{}="
        begin, end = f"{cls}(", ")"
    else:
        return None
    nodes = [_written(part, modules) for _, part in parts]
    if None in nodes:
        return None
    own = (dataclasses.replace(n, label=label.format(key)) for n, (key, _) in zip(nodes, parts, strict=True) if n)
    return _Node(begin, tuple(own), end)


def _class_code(cls: type, modules: set[str]) -> str | None:
    """The expression for a class, whose module is added to `modules`; None for one that no module has by its name."""
    if cls.__module__ == "__main__":
        return cls.__qualname__ if "<" not in cls.__qualname__ else None
    packages = cls.__module__.split(".")
    for i in range(1, len(packages) + 1):  # the public name of a class of `optax._src.base` is that of `optax`
        module = ".".join(packages[:i])
        found: Any = importlib.import_module(module)
        for part in cls.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is cls:
            modules.add(module)
            return f"{module}.{cls.__qualname__}"
    return None


def _text(node: _Node, indent: int = 0) -> str:
    """An expression on one line, or with its parts on lines of their own where they are many."""
    line = node.begin + ", ".join(part.label + _text(part) for part in node.parts) + node.end
    has_comments = any(part.comment for part in node.parts)
    if not node.parts or (not has_comments and "\n" not in line and indent + len(node.label) + len(line) <= WIDTH):
        return line
    inner = " " * (indent + 4)
    rows = [
        f"{inner}{part.label}{_text(part, indent + 4)}," + (f"  # {part.comment}" if part.comment else "")
        for part in node.parts
    ]
    return "\n".join([node.begin, *rows, " " * indent + node.end.lstrip(",")])


# ---- constraints inside


def _constraints(plan: Plan) -> Iterator[str]:
    """A sharding for each constraint, named by its line, with the line of code that applies it."""
    posed = answered_call(plan).posed
    op_of = {number: posed.call.traced.graph.ops[i] for i, number in posed.anchored.items()}
    equation_of = {number: eqn for number, eqn, _ in equations(posed.call.traced.jaxpr)}
    values, taken = posed.call.traced.graph.values, collections.Counter[str]()
    for constraint in sorted(plan.constraints, key=lambda c: (c.where, c.number)):
        op_name = with_article(constraint.kind)
        op, eqn = op_of.get(constraint.number), equation_of.get(constraint.number)
        is_backward = "transpose(" in str(getattr(getattr(eqn, "source_info", None), "name_stack", ""))
        place = file_line(constraint.where) if constraint.where else f"equation {constraint.number}"
        for what, specs, ids in (
            ("operand", constraint.operands, op.inputs if op else ()),
            ("result", constraint.results, op.outputs if op else ()),
        ):
            for i, spec in enumerate(specs):
                if spec is None:
                    continue
                which = f"{what} {i}" if len(specs) > 1 else what
                shape = f", {values[ids[i]].dtype}{list(values[ids[i]].shape)}" if i < len(ids) else ""
                if is_backward:
                    yield f"# {place}, {which} of {op_name} of the backward pass{shape}: {spec_code(spec)}"
                    yield "# (plan.apply writes it; a constraint on the value of the forward pass holds its gradient, too)"
                    continue
                base = re.sub(r"\W+", "_", place.rpartition("/")[2].replace(".py", "")).strip("_")
                base = base if _is_name(base) else f"line_{base}"
                taken[base] += 1
                name = base if taken[base] == 1 else f"{base}_{taken[base]}"
                yield f"# {place}, {which} of {op_name}{shape}: y = jax.lax.with_sharding_constraint(y, {name})"
                yield f"{name} = NamedSharding(mesh, {spec_code(spec)})"

"""MindSpore's strategy JSON to a layout file's data, and a plan to such JSON.

Each parameter there has a device matrix and a tensor map (axis k counted from the last, -1 for unsharded). If its optimizer
state is sharded too, it has the number of shards along dim 0 (`opt_weight_shard_size`) and the distance of their ranks
(`opt_weight_shard_step`). In a layout file all parameters share one mesh: the coarsest with every axis of theirs.
"""

from __future__ import annotations

import itertools
import json
import math
import string
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeGuard

from shardfn.errors import Problem
from shardfn.frontend.paths import escaped
from shardfn.frontend.strategy import short
from shardfn.layoutfile.mindspore_protobuf import LAYOUTS, STRATEGIES
from shardfn.layoutfile.toml import MAX_DIMS, MAX_RULES, MAX_SIZE, rule_dims
from shardfn.planning.layout_rules import LayoutFile, LayoutRule
from shardfn.planning.plan import Decision

Range = tuple[int, int]
"""An axis by the ranks it walks: from a stride to the stride of the axis before it, which it divides."""


def parse_json(text: str, name: str, problems: list[Problem]) -> LayoutFile | None:
    """The parameters' layouts of MindSpore's strategy JSON; None where `problems` has grown.

    >>> text = '{"parallel_layout_item": {"w1": {"dev_matrix": [2, 4], "tensor_map": [-1, 0], "tensor_shape": [32, 64]}}}'
    >>> layout = parse_json(text, "strategy.json", [])
    >>> layout.mesh, layout.arguments[0].sharding
    ((('a', 2), ('b', 4)), (1, 'b'))
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(Problem(f"{name} is no JSON", name, short(str(error)), "write it again: plan.save(path)"))
        return None
    return layout_of_rows(data, name, problems)


def layout_of_rows(data: Any, name: str, problems: list[Problem]) -> LayoutFile | None:
    """The parameters' layouts of the content of a strategy file; None where `problems` has grown."""
    before = len(problems)
    items = data.get(LAYOUTS) if isinstance(data, dict) else None
    if not isinstance(items, dict) or not 0 < len(items) <= MAX_RULES:
        problems.append(Problem(f"{name} is no strategy file", name, f"it holds no `{LAYOUTS}`, a dict of parameters",
                                "save it with MindSpore's strategy_ckpt_config"))  # fmt: skip
        return None
    ranges = {parameter: _ranges(parameter, item, name, problems) for parameter, item in items.items()}
    totals = {math.prod(item["dev_matrix"]) for item in items.values()} if len(problems) == before else {1}
    if len(totals) > 1:
        problems.append(Problem(f"the parameters of {name} are on {' and '.join(map(str, sorted(totals)))} devices", where=name,
                                why="one layout file has one mesh", fix="save each pipeline stage on its own"))  # fmt: skip
    if len(problems) > before:
        return None
    strides = sorted(
        {1, *totals, *(s for rows in ranges.values() for row in rows for pair in row for s in pair)}, reverse=True
    )
    for major, minor in itertools.pairwise(strides):
        if major % minor:
            problems.append(Problem(f"the device matrices of {name} do not fit one mesh", where=name,
                                    why=f"axes begin every {major} and every {minor} ranks",
                                    fix="save it with one order of the axes for all parameters"))  # fmt: skip
            return None
    letters = string.ascii_lowercase
    axes = [(letters[i % 26] + str(i // 26 or ""), pair) for i, pair in enumerate(itertools.pairwise(strides))]
    rules = []
    for parameter, rows in ranges.items():
        spec = [[n for major, minor in row for n, (top, low) in axes if low >= minor and top <= major] for row in rows]
        rules.append(LayoutRule(escaped(parameter), rule_dims(spec)))
    mesh = tuple((n, top // low) for n, (top, low) in axes)
    return LayoutFile(mesh=mesh, arguments=tuple(rules), about=f"from {name}", name=name)


def _ranges(parameter: str, item: Any, name: str, problems: list[Problem]) -> list[list[Range]]:
    """For each dim of a parameter the axes that shard it, as ranges of ranks."""
    found = checked(item)
    if isinstance(found, str):
        if len(problems) < 50:
            problems.append(Problem(f"the layout of {short(parameter)!r} in {name} cannot be read", where=short(item), why=found,
                                    fix="save it again with MindSpore, or take the parameter out"))  # fmt: skip
        return []
    matrix, tensor_map, size, step = found
    strides = [math.prod(matrix[i + 1 :]) for i in range(len(matrix))]
    rows = []
    for dim in tensor_map:
        at = [len(matrix) - 1 - k for k in dim if k >= 0]
        rows.append([(strides[i] * matrix[i], strides[i]) for i in at if matrix[i] > 1])
    if size > 1 and rows:
        rows[0] = [*rows[0], (step * size, step)]
    return rows


def checked(item: Any) -> tuple[list[int], list[list[int]], int, int] | str:
    """A parameter's row of a strategy JSON: device matrix, tensor map, and size and step of its optimizer's shards.

    Returns:
      What is wrong with it, as a sentence, where it is no such row.
    """
    if not isinstance(item, dict):
        return "it is no dict"
    matrix, written = item.get("dev_matrix"), item.get("tensor_map")
    if not _ints(matrix, 1) or math.prod(matrix) > MAX_SIZE:
        return f"dev_matrix must be a list of sizes, up to {MAX_SIZE:,} devices"
    dims = [dim if isinstance(dim, list) else [dim] for dim in written] if isinstance(written, list) else None
    if dims is None or len(dims) > MAX_DIMS or not all(_ints(dim, -1) for dim in dims):
        return "tensor_map must be a list of ints, or of lists of ints for a dim that several axes shard"
    used = [k for dim in dims for k in dim if k >= 0]
    if any(k >= len(matrix) for k in used) or len(set(used)) < len(used):
        return f"tensor_map {short(written)} names an axis twice, or one that dev_matrix {short(matrix)} does not have"
    shape = item.get("tensor_shape")
    if shape is not None and (not _ints(shape, 0) or len(shape) != len(dims)):
        return "tensor_shape and tensor_map speak of different numbers of dims"
    size, step = item.get("opt_weight_shard_size", 0), item.get("opt_weight_shard_step", 0)
    if type(size) is not int or type(step) is not int:
        return "opt_weight_shard_size and opt_weight_shard_step are ints"
    if size > 1:
        strides = [math.prod(matrix[i + 1 :]) for i in range(len(matrix))]
        taken = [strides[len(matrix) - 1 - k] for k in used]
        if step < 1 or math.prod(matrix) % (step * size):
            return f"{size} optimizer shards every {step} ranks do not fit {math.prod(matrix)} devices"
        if any(step <= s < step * size or s <= step < s * matrix[strides.index(s)] for s in taken):
            return "the optimizer is sharded over an axis that already shards the parameter"
    if item.get("field"):
        return "`field` asks for shards of unequal size, which are not built"
    return matrix, dims, size, step


def _ints(values: Any, least: int) -> TypeGuard[list[int]]:
    return isinstance(values, list) and 0 <= len(values) <= MAX_DIMS and all(
        type(v) is int and least <= v <= MAX_SIZE for v in values
    )  # fmt: skip


def strategy_content(
    decisions: Sequence[Decision], axes: Sequence[tuple[str, int]], ops: Iterable[Any], arguments: Collection[str]
) -> dict[str, Any]:
    """The content of MindSpore's strategy file, of parameters and of ops (`OpStrategy`).

    The name of an argument is left out where no two names are then equal. A dim over several adjacent mesh axes is written
    over one axis of their size.
    """
    tails = [rest if rest and first in arguments else d.path
             for d in decisions for first, _, rest in [d.path.partition("/")]]  # fmt: skip
    layouts = {}
    for d, tail in zip(decisions, tails, strict=True):
        matrix, tensor_map = _matrix(d, axes or (("a", 1),))
        layouts[(d.path if tails.count(tail) > 1 else tail).replace("/", ".")] = {
            "dev_matrix": matrix, "field": 0, "opt_weight_shard_size": 0, "opt_weight_shard_step": 0,
            "tensor_map": tensor_map, "tensor_shape": list(d.shape),
        }  # fmt: skip
    strategies = {name: {"parallel_strategy": one, "stage": 0} for name, one in strategies_by_op(ops).items()}
    return {"current_stage": 1, LAYOUTS: layouts, STRATEGIES: strategies}


def strategies_by_op(ops: Iterable[Any]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The operands' strategies of each `OpStrategy`, by the op's name and its number among those of that name."""
    counts: dict[str, int] = {}
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    for op in ops:
        at = counts[op.op] = counts.get(op.op, -1) + 1
        found[f"{op.op}-op{at}"] = op.inputs
    return found


def _matrix(d: Decision, axes: Sequence[tuple[str, int]]) -> tuple[list[int], list[Any]]:
    """The device matrix, with adjacent axes that shard one dim merged, and the tensor map on it."""
    names = [name for name, _ in axes]
    joined = {
        dim for dim in d.spec if len(dim) > 1 and list(dim) in [names[i : i + len(dim)] for i in range(len(names))]
    }
    groups: list[tuple[str, ...]] = []
    for name in names:
        if groups and any(name in dim and groups[-1][0] in dim for dim in joined):
            groups[-1] = (*groups[-1], name)
        else:
            groups.append((name,))
    sizes = dict(axes)
    place = {group[0]: len(groups) - 1 - i for i, group in enumerate(groups)}
    tensor_map: list[Any] = []
    for dim in d.spec:
        at = [place[name] for name in dim if name in place]
        tensor_map.append(-1 if not at else at[0] if len(at) == 1 else at)
    return [math.prod(sizes[name] for name in group) for group in groups], tensor_map


def trained(decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions on trainable parameters: arrays of floats in pytrees, without their shadows in an optimizer's state.

    Those of a training step are below `state/params`. Otherwise it is a guess: where no argument is a pytree, every array of
    floats is taken for a parameter.
    """
    if any(d.path == "state/step" for d in decisions):
        decisions = [d for d in decisions if d.path.startswith("state/params")]
    floats = [d for d in decisions if d.dtype.startswith(("float", "bfloat", "complex")) and d.shape]
    nested = [d for d in floats if "/" in d.path] or floats
    tails = {(d.path.split("/", 1)[-1], d.shape) for d in nested}

    def is_shadow(d: Decision) -> bool:
        parts = d.path.split("/")
        return any(("/".join(parts[i:]), d.shape) in tails for i in range(2, len(parts)))

    return [d for d in nested if not is_shadow(d)]

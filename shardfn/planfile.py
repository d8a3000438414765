"""A plan as JSON for people and programs to read: the grid, every layout by its path, the prices."""

from __future__ import annotations

import json
import math
from typing import Any

from shardfn.decisions import Constraint, Decision
from shardfn.graph.model import Spec
from shardfn.plan import Plan

FORMAT = "shardfn-plan"
VERSION = 1
"""It grows when a key goes away or changes its meaning, not when one is added."""


def to_data(plan: Plan) -> dict[str, Any]:
    """Plain data of a plan: what `json` takes, with keys in a fixed order.

    `axes` of an array holds for each dim the axes of the grid that cut it, major to minor. Times are modelled seconds,
    memory is bytes of one device, `gap` how far from the best the search may be (null: not known).

    >>> import jax, shardfn
    >>> x, w = jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
    >>> data = to_data(shardfn.plan(lambda x, w: x @ w, x, w, in_strategy=((4, 1), (1, 2)), device="tpu-v5e:2x4"))
    >>> data["grid"], data["arguments"]["x"]["axes"], data["results"]["result"]["source"]
    ({'a': 4, 'b': 2}, [['a'], []], 'propagated')
    """
    price, hardware = plan.price, plan.hardware
    return {
        "format": FORMAT,
        "version": VERSION,
        "function": plan.function,
        "device": hardware.name,
        "devices": hardware.count,
        "grid": dict(plan.axes),
        "order": None if plan.order is None else list(plan.order),
        "level": plan.level,
        "policy": plan.policy,
        "gap": plan.gap if plan.gap is None or math.isfinite(plan.gap) else None,
        "price": {
            "time_s": price.time_s,
            "compute_s": price.compute_s,
            "communication_s": price.communication_s,
            "flops": price.flops,
            "bytes_sent": price.bytes_sent,
            "memory_bytes": price.memory.peak,
        },
        "arguments": {d.path: _array(d) for d in plan.inputs},
        "results": {d.path: _array(d) for d in plan.outputs},
        "inside": [_inside(c) for c in plan.constraints],
        "findings": list(plan.findings),
    }


def to_json(plan: Plan) -> str:
    """The text of `to_data`, a line for each array; the same for the same plan.

    >>> import jax, shardfn
    >>> made = shardfn.plan(abs, jax.ShapeDtypeStruct((8,), "float32"), in_strategy=((4,),), device="tpu-v5e:4")
    >>> json.loads(to_json(made)) == to_data(made)
    True
    """
    return "{\n" + ",\n".join(f" {_text(key)}: {_lines(value)}" for key, value in to_data(plan).items()) + "\n}"


def _lines(value: Any) -> str:
    """A dict of dicts, or a list, with a line for each of what it holds."""
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {_text(item)}" for item in value) + "\n ]"
    if isinstance(value, dict) and value and all(isinstance(item, dict) for item in value.values()):
        return "{\n" + ",\n".join(f"  {_text(key)}: {_text(item)}" for key, item in value.items()) + "\n }"
    return _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _array(d: Decision) -> dict[str, Any]:
    return {
        "shape": list(d.shape),
        "dtype": d.dtype,
        "cuts": list(d.cuts),
        "axes": _axes(d.spec),
        "source": d.source,
        "reason": d.reason,
    }


def _inside(c: Constraint) -> dict[str, Any]:
    ends = {
        name: [None if spec is None else _axes(spec) for spec in specs]
        for name, specs in (("operands", c.operands), ("results", c.results))
    }
    return {"op": c.kind, "number": c.number, "line": c.where, **ends}


def _axes(spec: Spec) -> list[list[str]]:
    return [list(dim) for dim in spec]

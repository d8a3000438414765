"""shardfn: everything open, a style, or the strategies of some parameters.

By default the search sends the fewest bytes; with `level="time"` it takes the least modelled time.
"""

from __future__ import annotations

from typing import Any

import jax

from benchmarks.peer_steps import Step
from shardfn import AUTO, shard

LAYOUTS = ("open", "open, time", "fsdp", "tensor")


def make(program: str, layout: str, step: Any, state: tuple, batch: tuple) -> Step:
    donated = tuple(range(len(state)))
    call: Any
    if layout == "open":
        # sharding: open
        call = shard(step, donate_argnums=donated)
        # end
    elif layout == "open, time":
        # sharding: open, time
        call = shard(step, level="time", donate_argnums=donated)
        # end
    elif layout == "fsdp":
        # sharding: fsdp
        call = shard(step, style="fsdp", donate_argnums=donated)
        # end
    elif program == "mlp":
        # sharding: mlp, tensor
        weights = {"w1": (1, 4), "b1": (4,), "w2": (4, 1), "b2": AUTO}
        call = shard(step, (weights, (2, 1), (2, 1)), donate_argnums=donated)
        # end
    else:
        # sharding: gpt2, tensor
        heads = dict.fromkeys(("*/wq", "*/wk", "*/wv"), (1, 4, 1))
        weights = {**heads, "*/wo": (4, 1, 1), "*/w1": (1, 4), "*/b1": (4,), "*/w2": (4, 1)}
        call = shard(step, (AUTO, AUTO, (2, 1)), parameter_plan=weights, donate_argnums=donated)
        # end
    placed = jax.device_put((*state, *batch), call.plan(*state, *batch).in_shardings)
    return Step(call, call.lower, placed[: len(state)], placed[len(state) :])

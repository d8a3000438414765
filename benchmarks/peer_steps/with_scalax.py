"""scalax: `sjit` with sharding rules."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from scalax.sharding import FSDPShardingRule, MeshShardingHelper, TreePathShardingRule

from benchmarks.peer_steps import Step, over_rows

LAYOUTS = ("fsdp", "tensor")


def make(program: str, layout: str, step: Any, state: tuple, batch: tuple) -> Step:
    donated = tuple(range(len(state)))
    if layout == "fsdp":
        # sharding: fsdp
        helper = MeshShardingHelper([8], ["data"])
        rule = FSDPShardingRule("data", 8, min_fsdp_size=1024)
        # end
    else:
        # sharding: tensor
        helper = MeshShardingHelper([2, 4], ["data", "model"])
        rule = TreePathShardingRule(
            ("w[qkv1]$", P(None, "model")),
            ("w[o2]$|b1$", P("model")),
            strict=False,
        )
        # end
    # sharding: fsdp; tensor
    call = helper.sjit(
        step,
        in_shardings=(*(rule for _ in state), *(P("data") for _ in batch)),
        out_shardings=(*(rule for _ in state), P()),
        donate_argnums=donated,
    )
    # end
    placed = jax.device_put(state, tuple(helper.match_sharding_rule(rule, tree) for tree in state))
    return Step(call, call.lower, placed, over_rows(helper.mesh, batch))

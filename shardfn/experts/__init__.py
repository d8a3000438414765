"""Mixture of experts: routing of tokens, their way to the experts' devices and back, and the losses that balance the load.

`route` chooses experts for each token, `dispatch` brings the tokens to them, and `combine` sums what they return. The
functions are pure and work in `jax.jit` and `shardfn.shard`, with tokens and experts sharded or not.
"""

from shardfn.experts.dispatch import Dispatched, combine, dispatch
from shardfn.experts.loads import Load, load
from shardfn.experts.losses import load_balance, router_z
from shardfn.experts.routing import Routing, route

__all__ = ["Dispatched", "Load", "Routing", "combine", "dispatch", "load", "load_balance", "route", "router_z"]

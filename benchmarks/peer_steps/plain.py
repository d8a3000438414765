"""`jax.jit` with a `NamedSharding` for every array; `fsdp, constrained` also holds activations to the batch's sharding."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_map_with_path

from benchmarks.peer_steps import Step, over_rows
from examples.models.layouts import Expert

LAYOUTS = ("fsdp", "fsdp, constrained", "tensor")


def fsdp(state):
    # sharding: fsdp; fsdp, constrained
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

    def sharding(leaf):
        fitting = [d for d in range(leaf.ndim) if leaf.shape[d] % 8 == 0]
        largest = max(fitting, key=lambda d: leaf.shape[d], default=None)
        return NamedSharding(mesh, P(*("data" if d == largest else None for d in range(leaf.ndim))))

    of_state = jax.tree.map(sharding, state)
    # end
    return mesh, of_state


def constrained(step):
    """The models call `hint`, which is `with_sharding_constraint` here: a line for each activation that is held."""
    return Expert((), {"data": 8}, {"batch": ("data",)}).written(step)


def tensor(program, state):
    # sharding: tensor
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)
    # end
    if program == "mlp":
        # sharding: mlp, tensor
        specs = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model")}
        # end
    else:
        # sharding: gpt2, tensor
        columns = dict.fromkeys(("wq", "wk", "wv", "w1"), P(None, "model"))
        specs = {**columns, "wo": P("model"), "b1": P("model"), "w2": P("model")}
        # end

    # sharding: tensor
    def sharding(path, leaf):
        name = keystr(path[-1:], simple=True)
        return NamedSharding(mesh, specs.get(name, P()))

    of_state = tree_map_with_path(sharding, state)
    # end
    return mesh, of_state


def make(program: str, layout: str, step: Any, state: tuple, batch: tuple) -> Step:
    mesh, of_state = tensor(program, state) if layout == "tensor" else fsdp(state)
    function = constrained(step) if layout == "fsdp, constrained" else step
    # sharding: fsdp; fsdp, constrained; tensor
    rows, loss = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    call = jax.jit(
        function,
        in_shardings=(*of_state, *(rows for _ in batch)),
        out_shardings=(*of_state, loss),
        donate_argnums=tuple(range(len(state))),
    )
    # end
    return Step(call, call.lower, jax.device_put(state, of_state), over_rows(mesh, batch))

"""Scan the layers of a training step's loss: whether the optimizer allows it, and how many layers to rematerialise."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import tree_util

from shardfn.errors import Problem, StrategyError, fail
from shardfn.frontend.byte_sizes import bytes_of
from shardfn.frontend.strategy import short
from shardfn.ir.rewrite import inner
from shardfn.train.pipelines.trace_loss import dot_flops
from shardfn.train.scan_layers.numpy_eval import numpy_jit
from shardfn.train.scan_layers.scan import ScannedLoss, scan_layers
from shardfn.train.steps.state import ModelParts


@dataclasses.dataclass(frozen=True)
class RematChoice:
    """How many blocks the backward pass rematerialises, and the modelled cost, from shapes.

    Bytes and operations are per device, for a batch that is sharded over all devices.
    """

    blocks: int
    of: int
    kept_bytes: int
    """Activations kept between forward and backward pass."""
    kept_bytes_before: int
    """The same without rematerialisation."""
    limit: int | None
    """Bytes that activations may take; None if the user gave the number of blocks."""
    flops_again: int
    """Floating-point operations that run twice."""

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" (limit {self.limit:,})"
        return (
            f"{self.blocks} of {self.of} blocks are rematerialised: activations take {self.kept_bytes:,} B per device instead "
            f"of {self.kept_bytes_before:,}{limit}, for {self.flops_again:,} more floating-point operations"
        )


def scan_step_loss(
    parts: ModelParts, model: Any, batch: tuple[Any, ...], loss_fn: Callable[..., Any], optimizer: Any, limit: int,
) -> ScannedLoss:  # fmt: skip
    """The step's loss with scanned layers; without groups, and with the reason, where scanning would change results.

    Raises:
      StrategyError: no batch was given.
    """
    if not batch:
        fail(StrategyError, "`reuse` and `recompute` need a batch in `init`", where="init(params)",
             why="the repeated layers are found in the loss, and the state depends on them",
             fix="give `init` a batch too, or its shapes: init(params, *batch)")  # fmt: skip
    changes = False

    def loss(arrays: Any, *batch: Any) -> Any:
        nonlocal changes
        used = parts.model(arrays)
        value = loss_fn(used, *batch)
        after = zip(tree_util.tree_leaves(arrays), tree_util.tree_leaves(parts.arrays(used)), strict=True)
        changes = changes or any(a is not b for a, b in after)
        return value

    shape = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))  # noqa: E731
    params, batch = tree_util.tree_map(shape, (parts.arrays(model), batch))
    scanned = scan_layers(loss, params, *batch, limit=limit)
    if changes:
        why = "the loss changes the model's state (batch statistics, counters), and each block has its own"
    else:
        why = _optimizer_objection(optimizer, scanned, params) if scanned.groups else ""
    return dataclasses.replace(scanned, runs=(), groups=(), diagnostics=(why, *scanned.diagnostics)) if why else scanned


def _optimizer_objection(optimizer: Any, scanned: ScannedLoss, params: Any) -> str:
    """Why an optimizer updates stacked parameters differently, empty if it does not.

    It is run on small arrays of the same structure and rank, and the sizes of its states on the real shapes are compared.
    """
    as_numbers = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731  # random keys are not optimised
    params = tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, np.uint32) if as_numbers(x) else x, params)
    rng = np.random.default_rng(0)
    sample = lambda x: rng.normal(size=[min(n, 4) for n in x.shape]).astype(x.dtype)  # noqa: E731
    small, *grads = (tree_util.tree_map(sample, params) for _ in range(3))
    try:
        with jax.ensure_compile_time_eval():  # `init` itself may be traced
            alone = _updated(optimizer, small, grads)
            together = scanned.unstack(_updated(optimizer, scanned.stack(small), [scanned.stack(g) for g in grads]))
        sizes = [
            sum(math.prod(x.shape) for x in tree_util.tree_leaves(jax.eval_shape(optimizer.init, p)) if x.shape)
            for p in (params, jax.eval_shape(scanned.stack, params))
        ]
    except Exception as error:
        return f"the optimizer does not take stacked parameters: {type(error).__name__}: {str(error).splitlines()[0]}"
    pairs = zip(tree_util.tree_leaves(alone), tree_util.tree_leaves(together), strict=True)
    if sizes[0] == sizes[1] and all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs):
        return ""
    return "the optimizer depends on each parameter as one array (a norm, a mask, a factored state), and stacking changes that"


def _updated(optimizer: Any, params: Any, grads: list[Any]) -> Any:
    """The parameters after one update for each of the gradients."""

    def loss(params: Any) -> jax.Array:  # for an optimizer that evaluates one
        return jnp.float32(1) + 0 * sum(jnp.sum(x) for x in tree_util.tree_leaves(params))

    def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params, value=jnp.float32(1), grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), state

    state, run = numpy_jit(optimizer.init)(params), numpy_jit(update)
    for one in grads:
        params, state = run(params, state, one)
    return tree_util.tree_map(np.asarray, params)


def choose_recomputed_blocks(
    scanned: ScannedLoss, rescan: Callable[[int], ScannedLoss], params: Any, batch: tuple[Any, ...], recompute: Any,
    memory_limit: Any, devices: int, state_bytes: int,
) -> RematChoice:  # fmt: skip
    """How many blocks to rematerialise: `recompute`, or for "auto" the fewest that fit the memory limit.

    Args:
      scanned: the loss, without rematerialisation.
      rescan: the loss with so many rematerialised blocks.
      params: shapes.
      batch: shapes.
      recompute: "auto", or a number of blocks.
      memory_limit: bytes per device, or text such as "2GiB".
      devices: how many devices share the batch.
      state_bytes: bytes of parameters, gradients and optimizer states per device.

    Raises:
      StrategyError: no layers are scanned, there are fewer blocks, or even all of them do not fit.
    """
    if not scanned.groups:
        fail(StrategyError, "there are no equal blocks to recompute", where=f"recompute = {short(recompute)}",
             why=scanned.explain(), fix="wrap functions or submodules with train.recompute yourself")  # fmt: skip
    count = max(run.count for run in scanned.runs)
    if isinstance(recompute, int) and recompute > count:
        fail(StrategyError, f"there are {count} equal blocks, not {recompute}", where=f"recompute = {recompute}",
             why="it is how many of them the backward pass rematerialises", fix=f"write {count} for all of them")  # fmt: skip
    stacked = jax.eval_shape(scanned.stack, params)
    none, every = (_kept_bytes(one.loss, stacked, batch) // devices for one in (scanned, rescan(count)))
    flops = _scan_flops(jax.make_jaxpr(scanned.loss)(stacked, *batch).jaxpr) // devices

    def choice(blocks: int, limit: int | None) -> RematChoice:
        return RematChoice(blocks, count, none - (none - every) * blocks // count, none, limit, flops * blocks // count)

    if recompute != "auto":
        return choice(recompute, None)
    amount = bytes_of(memory_limit, "memory_limit")
    if isinstance(amount, Problem):
        raise StrategyError(amount)
    limit = int(amount) - state_bytes
    found = next((one for n in range(count + 1) if (one := choice(n, limit)).kept_bytes <= limit), None)
    if found is None:
        fail(StrategyError, "the step does not fit into memory with every block recomputed",
             where=f"memory_limit = {short(memory_limit)}",
             why=f"per device, parameters, gradients and optimizer states take {state_bytes:,} B, activations {every:,}",
             fix="use a smaller batch, more devices, micro_batches or a parallel optimizer")  # fmt: skip
    return found


def _kept_bytes(loss: Callable[..., Any], params: Any, batch: tuple[Any, ...]) -> int:
    """Bytes kept between forward and backward pass, without the parameters."""
    first = lambda p, *b: tree_util.tree_leaves(loss(p, *b))[0]  # noqa: E731
    residuals = jax.eval_shape(lambda p, b: jax.vjp(lambda q: first(q, *b), p)[1], params, batch)
    count = lambda tree: collections.Counter((x.shape, x.dtype) for x in tree_util.tree_leaves(tree))  # noqa: E731
    return sum(math.prod(s) * d.itemsize * n for (s, d), n in (count(residuals) - count(params)).items())


def _scan_flops(jaxpr: Any, inside: bool = False) -> int:
    """Operations of the matmuls in the scans of a jaxpr."""
    total = 0
    for eqn in jaxpr.eqns:
        is_scan = eqn.primitive.name == "scan"
        if inside and eqn.primitive.name == "dot_general":
            total += dot_flops(eqn)
        trips = eqn.params["length"] if is_scan else 1
        total += trips * sum(_scan_flops(one, inside or is_scan) for one in inner(eqn))
    return total


def recompute_problems(recompute: Any, options: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with `recompute`."""
    if recompute is None or recompute is False:
        return []
    if recompute != "auto" and (not isinstance(recompute, int) or isinstance(recompute, bool) or recompute < 1):
        return [Problem(f"`recompute` cannot be {short(recompute)}", f"recompute = {short(recompute)}",
                        "it is how many blocks the backward pass rematerialises",
                        'write "auto" with a memory_limit, or a positive int',
                        is_type=not isinstance(recompute, int | str))]  # fmt: skip
    if recompute == "auto" and options.get("memory_limit") is None:
        return [Problem('`recompute="auto"` needs a memory limit', "memory_limit = None",
                        "it rematerialises as few blocks as fit into that", 'add memory_limit="14GiB"')]  # fmt: skip
    return []

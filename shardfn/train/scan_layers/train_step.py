"""A training step whose loss is folded: whether the optimizer allows it, how many blocks to recompute, and what it costs."""

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
from shardfn.train.scan_layers.numpy_eval import tried
from shardfn.train.scan_layers.scan import ScannedLoss, fold
from shardfn.train.steps.state import ModelParts


@dataclasses.dataclass(frozen=True)
class Chosen:
    """How many blocks are recomputed, and what that costs. All of it is reckoned from shapes."""

    blocks: int
    of: int
    kept_bytes: int
    """Bytes of activations on a device between the passes; the batch is taken to be cut over all devices."""
    kept_bytes_before: int
    limit: int | None
    """Bytes that activations may take; None where you said how many blocks."""
    flops_again: int
    """Floating-point operations of a device that run twice."""

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" (limit {self.limit:,})"
        return (
            f"{self.blocks} of {self.of} blocks are recomputed: activations take {self.kept_bytes:,} B on a device instead of "
            f"{self.kept_bytes_before:,}{limit}, for {self.flops_again:,} floating-point operations again"
        )


def folding_of(
    parts: ModelParts, model: Any, batch: tuple[Any, ...], loss_fn: Callable[..., Any], optimizer: Any, limit: int,
) -> ScannedLoss:  # fmt: skip
    """The folding of a step's loss; one that folds nothing, and says why, where it must not be folded.

    Raises:
      StrategyError: no batch was given.
    """
    if not batch:
        fail(StrategyError, "blocks are found in the loss, which needs a batch", where="init(params)",
             why="with `reuse` or `recompute` the state depends on what the loss does",
             fix="give `init` a batch too, or its shapes: init(params, *batch)")  # fmt: skip
    arrays = parts.arrays(model)
    changes = False

    def loss(given: Any, *batch: Any) -> Any:
        nonlocal changes
        used = parts.model(given)
        value = loss_fn(used, *batch)
        after = zip(tree_util.tree_leaves(given), tree_util.tree_leaves(parts.arrays(used)), strict=True)
        changes = changes or any(a is not b for a, b in after)
        return value

    shapes = tree_util.tree_map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), (arrays, batch))
    made = fold(loss, shapes[0], *shapes[1], limit=limit)
    if changes:
        return _not(
            made, "the loss changes the model's state (batch statistics, counters), which blocks keep each their own"
        )
    why = whole_leaves(optimizer, made, shapes[0]) if made.groups else ""
    return _not(made, why) if why else made


def _not(made: ScannedLoss, why: str) -> ScannedLoss:
    return dataclasses.replace(made, folded=(), groups=(), diagnostics=(why, *made.diagnostics))


def whole_leaves(optimizer: Any, made: ScannedLoss, params: Any) -> str:
    """Why an optimizer does something else to stacked parameters, empty if it does not.

    Tried on small arrays of the same structure and number of dims, and by the sizes of its states on the real shapes.
    """
    params = tree_util.tree_map(_numbers, params)
    few = tree_util.tree_map(lambda x: np.zeros([min(n, 4) for n in x.shape], x.dtype), params)
    rng = np.random.default_rng(0)
    draw = lambda tree: tree_util.tree_map(lambda x: rng.normal(size=x.shape).astype(x.dtype), tree)  # noqa: E731
    trial, grads = draw(few), [draw(few), draw(few)]
    name = "the optimizer works on each parameter as a whole (a norm, a mask, a factored state)"
    try:
        with jax.ensure_compile_time_eval():  # `init` may be traced itself
            alone = _after(optimizer, trial, grads)
            together = made.unstack(_after(optimizer, made.stack(trial), [made.stack(g) for g in grads]))
        real = [
            sum(math.prod(x.shape) for x in tree_util.tree_leaves(jax.eval_shape(optimizer.init, p)) if x.shape)
            for p in (params, jax.eval_shape(made.stack, params))
        ]
    except Exception as error:
        return f"the optimizer does not take stacked parameters: {type(error).__name__}: {str(error).splitlines()[0]}"
    pairs = zip(tree_util.tree_leaves(alone), tree_util.tree_leaves(together), strict=True)
    if any(not np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs) or real[0] != real[1]:
        return f"{name}, which stacked ones change"
    return ""


def _numbers(x: Any) -> Any:
    """An array's shape; keys of random numbers, which no optimizer sees, as numbers."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.ShapeDtypeStruct(x.shape, np.uint32) if is_key else x


def _after(optimizer: Any, params: Any, grads: list[Any]) -> Any:
    """The parameters after an update by each of the gradients."""

    def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(grads, state, params, value=jnp.float32(1), grad=grads, value_fn=_flat)
        return optax.apply_updates(params, updates), state

    state, run = tried(optimizer.init)(params), tried(update)
    for one in grads:
        params, state = run(params, state, one)
    return tree_util.tree_map(np.asarray, params)


def _flat(params: Any) -> jax.Array:
    """A loss for an optimizer that looks at one."""
    return jnp.float32(1) + 0 * sum(jnp.sum(x) for x in tree_util.tree_leaves(params))


def chosen(
    made: ScannedLoss, refold: Callable[[int], ScannedLoss], params: Any, batch: tuple[Any, ...], asked: Any,
    memory_limit: Any, devices: int, state_bytes: int,
) -> Chosen | None:  # fmt: skip
    """How many blocks are recomputed: `asked`, or for "auto" the fewest with which a device's memory is enough.

    Args:
      made: the folding, with none recomputed.
      refold: the same with so many.
      params, batch: shapes.
      asked: "auto", or a number of blocks.
      memory_limit: bytes of a device, or text such as "2GiB".
      devices: over how many the batch is cut.
      state_bytes: bytes of parameters, gradients and optimizer states on a device.

    Raises:
      StrategyError: not even all blocks are enough; there is no limit; nothing is folded; there are not so many blocks.
    """
    if not made.groups:
        fail(StrategyError, "there are no equal blocks to recompute", where=f"recompute = {short(asked)}",
             why=made.explain(), fix="wrap functions or submodules with train.recompute yourself")  # fmt: skip
    count = max(one.count for one in made.folded)
    if isinstance(asked, int) and asked > count:
        fail(StrategyError, f"there are {count} equal blocks, not {asked}", where=f"recompute = {asked}",
             why="so many of them do their forward work again", fix=f"write {count} for all of them")  # fmt: skip
    stacked = jax.eval_shape(made.stack, params)
    none, every = (_kept(one.loss, stacked, batch) // devices for one in (made, refold(count)))
    again = _flops(jax.make_jaxpr(made.loss)(stacked, *batch).jaxpr) // devices

    def of(blocks: int, limit: int | None) -> Chosen:
        return Chosen(blocks, count, none - (none - every) * blocks // count, none, limit, again * blocks // count)

    if asked != "auto":
        return of(asked, None)
    amount = bytes_of(memory_limit, "memory_limit")
    if isinstance(amount, Problem):
        raise StrategyError(amount)
    limit = int(amount) - state_bytes
    found = next((of(n, limit) for n in range(count + 1) if of(n, limit).kept_bytes <= limit), None)
    if found is None:
        fail(StrategyError, "the step does not fit into memory with every block recomputed",
             where=f"memory_limit = {short(memory_limit)}",
             why=f"parameters, gradients and optimizer states take {state_bytes:,} B on a device, activations {every:,}",
             fix="use a smaller batch, more devices, micro_batches or a parallel optimizer")  # fmt: skip
    return found


def _kept(loss: Callable[..., Any], params: Any, batch: tuple[Any, ...]) -> int:
    """Bytes kept between the passes, parameters aside."""
    first = lambda p, *b: tree_util.tree_leaves(loss(p, *b))[0]  # noqa: E731
    held = jax.eval_shape(lambda p, b: jax.vjp(lambda q: first(q, *b), p)[1], params, batch)
    own = collections.Counter((x.shape, x.dtype) for x in tree_util.tree_leaves(params))
    total = 0
    for x in tree_util.tree_leaves(held):
        if own[x.shape, x.dtype]:
            own[x.shape, x.dtype] -= 1
        else:
            total += math.prod(x.shape) * x.dtype.itemsize
    return total


def _flops(jaxpr: Any, inside: bool = False) -> int:
    """Operations of the matrix products in the scans of a jaxpr."""
    total = 0
    for eqn in jaxpr.eqns:
        if inside and eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[d] for d in contracted)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for one in inner(eqn):
            total += times * _flops(one, inside or eqn.primitive.name == "scan")
    return total


def recompute_problems(recompute: Any, options: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with `recompute`."""
    if recompute is None or recompute is False:
        return []
    if recompute != "auto" and (not isinstance(recompute, int) or isinstance(recompute, bool) or recompute < 1):
        return [Problem(f"`recompute` cannot be {short(recompute)}", f"recompute = {short(recompute)}",
                        "it is how many blocks are worked out again in the backward pass",
                        'write "auto" with a memory_limit, or a positive int',
                        is_type=not isinstance(recompute, int | str))]  # fmt: skip
    if recompute == "auto" and options.get("memory_limit") is None:
        return [Problem('`recompute="auto"` needs a memory limit', "memory_limit = None",
                        "it recomputes as few blocks as fit into that", 'add memory_limit="14GiB"')]  # fmt: skip
    return []

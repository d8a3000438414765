"""What to write where a convolution is gathered because XLA computes it wrongly: another sharding, or a halo exchange."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from shardfn.frontend.meshes import partition_spec
from shardfn.ir.model import Op, Spec, mesh_sizes
from shardfn.ir.partitioned import PartitionedProgram
from shardfn.ir.source_lines import file_line
from shardfn.ir.specs import strategy_of
from shardfn.planning.call import AnsweredCall
from shardfn.planning.diagnostics.rules import OPS, origin, set_text
from shardfn.planning.plan import Plan
from shardfn.planning.workarounds import before_resharding, wrong_ops

BATCH_ALONE = "shard the batch over all devices, and leave the spatial dimensions unsharded"


def windows_fix(plan: Plan, lines: Collection[str], unguarded: AnsweredCall, partitioned: PartitionedProgram) -> str:
    """The fix for convolutions and poolings that are gathered, by the first of them: a sharding of its image over all devices
    that needs no workaround, and the layout for `halo.conv`.

    Args:
      plan: the plan, whose program gathers them.
      lines: where they are.
      unguarded: the same call and answer without that workaround.
      partitioned: its program.
    """
    moved = before_resharding(partitioned.graph)
    for op in partitioned.graph.ops:
        if op.where in lines and (op.convolution is not None or op.name == "select_and_scatter"):
            image = moved.get(op.inputs[0], op.inputs[0])
            found = next(_shardings(plan, unguarded, partitioned, image), BATCH_ALONE)
            return "; or ".join([found, *_halo(plan, op, partitioned, image)])
    return BATCH_ALONE


def _shardings(plan: Plan, unguarded: AnsweredCall, partitioned: PartitionedProgram, image: int) -> Iterator[str]:
    """The shardings of the argument that an image is, along one dimension over all devices, which need no workaround."""
    d, graph = origin(plan, image, partitioned.graph), partitioned.graph
    if d is None or d.shape != graph.values[image].shape or len(graph.ops) * len(d.shape) > OPS:
        return
    every = tuple(name for name, _ in plan.axes)
    for dim, size in enumerate(d.shape):
        if size % plan.hardware.count == 0:
            spec: Spec = tuple(every if i == dim else () for i in range(len(d.shape)))
            if not any(w.kind == "window" for w in wrong_ops(unguarded.partitioned_with((d.path,), spec))):
                yield set_text(d, strategy_of(spec, plan.axes))


def _halo(plan: Plan, op: Op, partitioned: PartitionedProgram, image: int) -> Iterator[str]:
    """The argument that `halo.conv` takes in the place of `jax.lax.conv_general_dilated`, where the image has even shards."""
    spec, shape, axes = partitioned.specs[image], partitioned.graph.values[image].shape, plan.axes
    if op.convolution is None or not any(spec[d] for d in op.convolution.image):
        return
    names = {name for name, _ in axes}
    if not all(axis in names for dim in spec for axis in dim):
        return
    if any(size % ways for size, ways in zip(shape, strategy_of(spec, axes), strict=True)):
        return
    auto = f"axis_types=(jax.sharding.AxisType.Auto,) * {len(axes)}"
    written = ", ".join(json.dumps(name) for name, _ in axes) + "," * (len(axes) == 1)
    mesh = "mesh" if plan.hardware.mesh is not None else f"jax.make_mesh({mesh_sizes(axes)}, ({written}), {auto})"
    at = f" at {file_line(op.where)}" if op.where else ""
    yield (
        f"to compute it sharded, write shardfn.halo.conv for jax.lax.conv_general_dilated{at}, with the same arguments and "
        f"layout=jax.NamedSharding({mesh}, jax.{partition_spec(spec)!r})"
    )

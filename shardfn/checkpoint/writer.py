"""`save`: write a state and its shardings as one step of a folder."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import tree_util
from jax.sharding import Mesh, NamedSharding, Sharding

from shardfn import layoutfile
from shardfn.checkpoint import arrays, state_tree, targets
from shardfn.checkpoint.chunks import choose_chunks
from shardfn.checkpoint.contents import StoredArray, StoredMesh, mesh_order
from shardfn.checkpoint.step_folders import StrPath, check_free, folder_for_writing, no_steps, steps, whole_number
from shardfn.errors import CheckpointError, CheckpointFileError, fail
from shardfn.frontend.meshes import spec_of
from shardfn.frontend.paths import listed
from shardfn.ir.model import Spec
from shardfn.runtime.extras import need

if TYPE_CHECKING:
    from shardfn.checkpoint.orbax_store import Saving


def save(
    path: StrPath,
    state: Any,
    plan: Any = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    background: bool = False,
) -> Saving:
    """Save a pytree of arrays, numbers and PRNG keys as one step of a folder, with its shardings.

    A step is complete or absent: it gets its name when all of its files are on disk. Every process of a job must call
    `save`; each writes the shards that its devices hold.

    Args:
      path: the folder of all steps, on a disk that all processes see.
      state: a pytree, such as parameters and optimizer state; `restore` finds an array by its path in the tree.
      plan: the plan or layout file that the state is trained with, stored as `layout.toml`. None stores the shardings of
        the arrays.
      step: the number of the step, from 0; one more than the last if None. With `keep` it must be later than the last.
      keep: how many steps to keep, this one included; older ones are deleted when this one is complete. All if None.
      keep_every: also keep the steps that this number divides.
      background: return when everything is in host memory, and write in the background.

    Returns:
      The save; its `wait()` returns when the step is complete. The next `save` or `restore` in the folder, and the end of
      the program, wait for it too.

    Raises:
      CheckpointError: leaves that cannot be saved, all at once; a step that exists already; a folder there whose name is a
        number, and which is no step; a path with a backslash or with a pattern in brackets, such as `run[1]`; another
        process saves in the folder.
      CheckpointFileError: the disk is full or read-only. Earlier steps are complete.
      ExtraError: the packages of the extra `checkpoint` are not installed.

    >>> import tempfile, jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as path:
    ...     save(path, {"w": jnp.ones((8, 4))}, step=10).step
    10
    """
    need("tensorstore", "checkpoint")
    need("orbax.checkpoint", "checkpoint")
    from shardfn.checkpoint import orbax_store

    folder = folder_for_writing(path)
    where = f"save({str(path)!r}, …"
    step = step if step is None else whole_number("step", step, 0, where)
    keep = keep if keep is None else whole_number("keep", keep, 1, where)
    keep_every = keep_every if keep_every is None else whole_number("keep_every", keep_every, 1, where)
    flat = state_tree.flatten(state)
    state_tree.check_stored({leaf.path: leaf.value.dtype for leaf in flat})
    shapes = [leaf.path for leaf in flat if isinstance(leaf.value, jax.ShapeDtypeStruct)]
    if shapes:
        fail(CheckpointError, f"`{shapes[0]}` is a shape, and no array", where=f"state at {listed(shapes)}",
             why="a ShapeDtypeStruct has no values", fix="give the array")  # fmt: skip
    gone = [leaf.path for leaf in flat if isinstance(leaf.value, jax.Array) and leaf.value.is_deleted()]
    if gone:
        fail(CheckpointError, f"`{gone[0]}` is deleted", where=f"state at {listed(gone)}",
             why="it was donated: a step reuses the memory of its state for the next one",
             fix="save the state that the step returned, or donate nothing (donate=False)")  # fmt: skip
    if not flat:
        fail(CheckpointError, "the state has no arrays", fix="pass a pytree of arrays, numbers or PRNG keys")
    orbax_store.wait_for_save(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known, others = steps(folder), no_steps(folder)
    except OSError as error:
        fail(CheckpointFileError, f"{folder} cannot be created", why=str(error), fix="choose a writable folder")
    if others:
        fail(CheckpointError, f"{folder / others[0]} is no checkpoint", where=f"save({str(path)!r}, …)",
             why="Orbax takes a folder whose name is a number for a step, and may delete it",
             fix="move it, or choose another folder")  # fmt: skip
    if step is None:
        step = max(known, default=-1) + 1
    elif keep is not None and known and step < max(known):
        fail(CheckpointError, f"step {step} is before the last one, {max(known)}", where=f"save({str(path)!r}, …, keep={keep})",
             why="Orbax keeps the steps that were written last, and would delete later ones",
             fix=f"write a later step, {max(known) + 1}, or leave `keep` out")  # fmt: skip
    elif step in known:
        fail(CheckpointError, f"step {step} exists already", where=f"save({str(path)!r}, …, step={step})",
             why="steps are never overwritten", fix=f"write a later step: {max(known) + 1}")  # fmt: skip
    check_free(folder / str(step))
    for leaf in flat:
        if isinstance(leaf.value, jax.Array):
            for shard in arrays.own_shards(leaf.value):
                shard.data.copy_to_host_async()
    sources = [_source(leaf) for leaf in flat]
    layout = (
        targets.stored_layout([source.entry for source in sources]) if plan is None else layoutfile.read_layout(plan)
    )
    by_name = {source.entry.name: source for source in sources}
    # Dicts and lists: what nodes of other classes do with leaves that are no arrays is their own.
    tree = need("orbax.checkpoint", "checkpoint").tree.serialize_tree(
        state_tree.without_attributes_of_lists(state), keep_empty_nodes=True
    )
    tree = tree_util.tree_map_with_path(lambda key, _: by_name[state_tree.name_of(key)], tree)
    saved = orbax_store.Saved(tree, layout, _devices(flat), is_layout_given=plan is not None)
    saving = orbax_store.begin(folder, step, saved, keep, keep_every)
    if not background:
        saving.wait()
    return saving


def _source(leaf: state_tree.StateLeaf) -> Any:
    """The description of a leaf, its shards in this process and its sharding, for Orbax."""
    from shardfn.checkpoint.orbax_arrays import jax_sharding_text, source_of

    sharding = leaf.value.sharding if isinstance(leaf.value, jax.Array) else None
    mesh, strategy, spec = stored_sharding(leaf.shape, sharding, _order(getattr(sharding, "mesh", None)))
    chunks = choose_chunks(leaf.shape, strategy, jax.dtypes.itemsize_bits(leaf.value.dtype) / 8)
    entry = StoredArray(leaf.path, leaf.shape, leaf.dtype, leaf.keys, strategy, chunks, spec, mesh, leaf.kind)
    boxes = [(box, functools.partial(np.asarray, shard)) for box, shard in arrays.local_shards(leaf.value)]
    return source_of(entry, boxes, jax_sharding_text(sharding))


def _devices(flat: Sequence[state_tree.StateLeaf]) -> int:
    """The most devices that an array is on."""
    return max((len(x.value.sharding.device_set) for x in flat if isinstance(x.value, jax.Array)), default=1)


def stored_sharding(
    shape: tuple[int, ...], sharding: Sharding | None, order: tuple[int, ...] | None
) -> tuple[StoredMesh, tuple[int, ...], Spec]:
    """The mesh of a sharding, the number of shards of each dimension, and the mesh axes of each dimension."""
    unsharded: Spec = ((),) * len(shape)
    if sharding is None:
        return StoredMesh(()), (1,) * len(shape), unsharded
    strategy = tuple(n // s if s else 1 for n, s in zip(shape, sharding.shard_shape(shape), strict=True))
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return StoredMesh(()), strategy, unsharded
    return StoredMesh(tuple(sharding.mesh.shape.items()), order), strategy, spec_of(sharding.spec, len(shape))


def _order(mesh: Any) -> tuple[int, ...] | None:
    """The device at each mesh position, by its place among all devices; None where they are in order."""
    return mesh_order([(d.process_index, d.id) for d in mesh.devices.flat]) if isinstance(mesh, Mesh) else None

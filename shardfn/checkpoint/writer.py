"""`save`: a state with its layout into a step of a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardfn import layoutfile
from shardfn.checkpoint import state_tree, targets
from shardfn.checkpoint.chunks import Chunks, choose_chunks
from shardfn.checkpoint.contents import Contents, StoredArray, StoredMesh, bits
from shardfn.checkpoint.step_folders import absolute_path, steps
from shardfn.errors import CheckpointError, CheckpointFileError, fail
from shardfn.frontend.meshes import spec_of
from shardfn.layoutfile.toml import to_toml
from shardfn.runtime.extras import need

if TYPE_CHECKING:
    from shardfn.checkpoint.orbax_store import Saving

LAYOUT = "layout.toml"


def save(
    path: str | os.PathLike[str],
    state: Any,
    plan: Any = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    background: bool = False,
) -> Saving:
    """Save a pytree of arrays, numbers and PRNG keys as one step of a folder, with its layout.

    A step is there whole or not at all: it gets its name when all of it is on disk. Every process of a job calls `save`,
    and writes what its devices hold.

    Args:
      path: the folder of all steps, on a disk that all processes see.
      state: parameters, optimizer state, anything; an array is found again by its path in the tree.
      plan: the plan that the state is trained with, or a layout; it is stored beside the arrays as `layout.toml`.
        Without it the layout that the arrays have is.
      step: the number of the step; one more than the last if left out.
      keep: how many steps to keep, this one among them; older ones are removed when this one is whole. All if None.
      keep_every: steps that this divides are kept besides.
      background: return when everything is in host memory, and write meanwhile. `wait()` of what is returned ends when it
        is on disk. The next `save` or `restore` in the folder waits for it too, and so does the end of the program.

    Raises:
      CheckpointError: leaves that cannot be saved, all at once; a step that is there already.
      CheckpointFileError: the disk is full, or not to be written to. What was saved before is whole.
      ExtraError: the packages of the extra `checkpoint` are not installed.

    >>> import tempfile, jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as path:
    ...     save(path, {"w": jnp.ones((8, 4))}, step=10).step
    10
    """
    need("tensorstore", "checkpoint")
    need("orbax.checkpoint", "checkpoint")
    from shardfn.checkpoint import orbax_store

    folder = absolute_path(path)
    for name, value, least in (("step", step, 0), ("keep", keep, 1), ("keep_every", keep_every, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            fail(CheckpointError, f"`{name}` is {value!r:.40}", where=f"save({str(path)!r}, …, {name}={value!r:.40})",
                 fix=f"write an int of {least} or more")  # fmt: skip
    flat = state_tree.flatten(state)
    if not flat:
        fail(CheckpointError, "there is nothing to save", why="the tree has no arrays", fix="pass the state to save")
    orbax_store.wait_for_save(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = steps(folder)
    except OSError as error:
        fail(
            CheckpointFileError,
            f"{folder} cannot be made",
            why=str(error),
            fix="choose a folder that can be written to",
        )
    if step is None:
        step = max(known, default=-1) + 1
    elif step in known:
        fail(CheckpointError, f"step {step} is there already", where=f"save({str(path)!r}, …, step={step})",
             why="a step is never overwritten", fix=f"write a later step: {max(known) + 1}")  # fmt: skip
    contents = describe_state(flat)
    from shardfn.checkpoint.arrays import local_shards

    texts = layout_texts(plan, contents)
    pieces = {leaf.path: local_shards(leaf.value) for leaf in flat}
    saving = orbax_store.begin(folder, step, contents, pieces, texts, keep, keep_every)
    if not background:
        saving.wait()
    return saving


def describe_state(flat: Sequence[state_tree.StateLeaf]) -> Contents:
    """What is to be saved: where every array lies, and how its files are cut."""
    grids: dict[StoredMesh, int] = {}
    entries = []
    devices = 1
    for leaf in flat:
        grid, cuts, spec = _lies(leaf.value)
        number = grids.setdefault(grid, len(grids))
        devices = max(devices, len(leaf.value.sharding.device_set) if isinstance(leaf.value, jax.Array) else 1)
        itemsize = bits(leaf.dtype) / 8
        cut = choose_chunks(leaf.shape, cuts, itemsize) if 0 not in leaf.shape else Chunks(leaf.shape, leaf.shape)
        entries.append(StoredArray(leaf.path, leaf.shape, leaf.dtype, leaf.keys, cuts, cut, spec, number, leaf.kind))
    return Contents(tuple(entries), tuple(grids), devices, jax.process_count())


def _lies(value: Any) -> tuple[StoredMesh, tuple[int, ...], tuple[tuple[str, ...], ...]]:
    """The grid of an array, how many ways its dims are cut, over which axes."""
    whole = StoredMesh(()), (1,) * value.ndim, ((),) * value.ndim
    if isinstance(value, np.ndarray):
        return whole
    sharding = value.sharding
    piece = sharding.shard_shape(value.shape)
    cuts = tuple(n // p if p else 1 for n, p in zip(value.shape, piece, strict=True))
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return whole[0], cuts, whole[2]
    grid = StoredMesh(tuple(sharding.mesh.shape.items()), _order(sharding.mesh))
    return grid, cuts, spec_of(sharding.spec, value.ndim)


def _order(mesh: Any) -> tuple[int, ...] | None:
    """Which device stands where, by their place among all devices, where they do not stand in order."""
    placed = list(mesh.devices.flat) if isinstance(mesh, Mesh) else []
    ranks = {device: i for i, device in enumerate(sorted(placed, key=lambda d: (d.process_index, d.id)))}
    order = tuple(ranks[device] for device in placed)
    return None if order == tuple(range(len(order))) else order


def layout_texts(plan: Any, contents: Contents) -> dict[str, str]:
    """The text of `layout.toml`: of the plan or the layout that was given, else of the arrays as they lie.

    Raises:
      ShardError: it is no plan and no layout.
    """
    layout = targets.stored_layout(contents) if plan is None else layoutfile.read_layout(plan)
    return {} if layout is None else {LAYOUT: to_toml(layout)}

"""The sharding of each weight, from the `predict_strategy` of `load_distributed_checkpoint`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardfn import layoutfile
from shardfn.checkpoint import targets
from shardfn.checkpoint.contents import StoredArray
from shardfn.cost.devices import hardware
from shardfn.cost.devices.hardware import Hardware
from shardfn.errors import CheckpointError, Problem, StrategyError, fail, raise_problems
from shardfn.frontend.parameter_plan import apply_parameter_plan
from shardfn.frontend.paths import listed, met, normal
from shardfn.frontend.strategy import AUTO, Argument, Leaf, is_entry, match, short
from shardfn.frontend.validation import check, check_all
from shardfn.mindspore.inference.predict import PredictLayout, WeightLayout
from shardfn.mindspore.layout import Layout
from shardfn.mindspore.rank_checkpoints import read_strategy
from shardfn.planning.layout_rules import LayoutFile
from shardfn.planning.plan import Plan, decision_of


def shardings(strategy: Any, entries: Sequence[StoredArray], tree: Any, device: Any) -> dict[str, Sharding]:
    """The sharding of each weight, by its name.

    Args:
      strategy: a `PredictLayout`, a plan, a layout file or the name of a recipe, MindSpore's strategy JSON, entries by path
        glob as in `parameter_plan`, one entry or a pytree prefix of entries as in `in_strategy`, shardings. None: one device.
      entries: the weights, under their names.
      tree: their structure, with shapes.
      device: which devices, as `shard` takes it; all if None. A plan has its own.

    Raises:
      ShardError: all that does not fit.
    """
    if isinstance(strategy, PredictLayout):
        return _predicted(strategy, entries)
    found = hardware.resolve(device)
    if found.devices is None:
        instead = hardware.used_here(found)
        fail(CheckpointError, f"weights cannot be loaded onto {found.name}, which is {'a target' if instead else 'not here'}",
             where=f"device = {device!r:.60}", why="a target is only planned for",
             fix=instead or "give devices of this machine: jax.devices()[:4]")  # fmt: skip
    if strategy is None:
        return {entry.path: SingleDeviceSharding(found.devices[0]) for entry in entries}
    if isinstance(strategy, Plan | Sharding | Mesh | jax.Device) or targets.is_device_list(strategy):
        return targets.target_shardings(entries, strategy)
    if isinstance(strategy, str | os.PathLike | LayoutFile):
        layout = layoutfile.read_layout(strategy)
        if layout.arguments and not any(_meets(rule.glob, entries) for rule in layout.arguments):
            fail(CheckpointError, f"no rule of {layout.name} meets a weight", where=f"predict_strategy = {short(strategy)}",
                 why=f"the weights are {listed([entry.path for entry in entries])}",
                 fix="use the layout of this model, or name the weights as it does with name_map")  # fmt: skip
        return targets.layout_targets(entries, layout, None, found.devices)
    return _written(strategy, entries, tree, found)


def _meets(glob: str, entries: Sequence[StoredArray]) -> bool:
    paths = [normal(entry.path) for entry in entries]
    return bool(met(glob, paths)[0] or ("/" in glob and met(glob.partition("/")[2], paths)[0]))


def _predicted(layout: PredictLayout, entries: Sequence[StoredArray]) -> dict[str, Sharding]:
    plan = layout.plan if layout.plan.hardware.devices is not None else layout.plan.with_devices(jax.devices())
    mesh, paths = plan.mesh, layout.weights.paths
    if missing := [entry.path for entry in entries if entry.path not in paths]:
        fail(CheckpointError, f"the predicted layout has no weight `{missing[0]}`", where=repr(layout),
             why=f"{len(missing)} weights are not among those it was made for",
             fix="make it for this function: infer_predict_layout(fn, *shapes)")  # fmt: skip
    return {e.path: NamedSharding(mesh, decision_of(plan, paths[e.path]).partition_spec) for e in entries}


def _written(strategy: Any, entries: Sequence[StoredArray], tree: Any, found: Hardware) -> dict[str, Sharding]:
    """Entries, each on a mesh of its own: MindSpore's rule for a single tensor."""
    problems: list[Problem] = []
    if isinstance(strategy, Mapping) and strategy and all(map(_is_row, strategy.values())):  # in MindSpore's form
        rows = {name: row._asdict() if isinstance(row, WeightLayout) else row for name, row in strategy.items()}
        strategy = {name: sliced.layout for name, sliced in read_strategy(rows).items()}
    if _is_table(strategy) and not (isinstance(tree, Mapping) and set(tree) == set(strategy)):  # else a pytree prefix
        plain = [Leaf(e.path, f"`{e.path}`", e.shape, e.dtype) for e in entries]
        leaves = apply_parameter_plan(plain, strategy, problems)
    else:
        given = match((Argument("", "the weights", tree),), (strategy,), "in_strategy", problems)
        leaves = given if len(given) == len(entries) else []
    check_all(leaves, found.count, problems)
    problems += [
        Problem(f"the entry of `{leaf.path}` names axes without a mesh", where=leaf.source,
                why="a PartitionSpec names no devices", fix="write a NamedSharding, a Layout or a tuple of ints")
        for leaf in leaves if isinstance(leaf.entry, PartitionSpec)
    ]  # fmt: skip
    for leaf in leaves:
        if isinstance(leaf.entry, Layout):
            leaf.entry.slice_shape(leaf.shape)
            if leaf.entry.size != found.count:
                problems.append(Problem(
                    f"the layout of `{leaf.path}` is for {leaf.entry.size} devices, and here are {found.count}",
                    leaf.source, "its device matrix names each", "say which devices: device=jax.devices()[:4]"))  # fmt: skip
    raise_problems([_as_said(problem) for problem in problems])
    return {leaf.path: _sharding(leaf, found) for leaf in leaves}


def _as_said(problem: Problem) -> Problem:
    """The problem, with `predict_strategy` in place of the option that has the entries in `shard`."""
    texts = dataclasses.asdict(problem)
    is_type = texts.pop("is_type")
    for old, new in (("in_strategy[0]", "predict_strategy"), ("parameter_plan", "predict_strategy"),
                     ("array of this call", "weight")):  # fmt: skip
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    return Problem(**texts, is_type=is_type)


def _is_table(strategy: Any) -> bool:
    return isinstance(strategy, Mapping) and all(isinstance(k, str) and is_entry(v) for k, v in strategy.items())


def _is_row(value: Any) -> bool:
    return isinstance(value, WeightLayout) or (isinstance(value, Mapping) and "dev_matrix" in value)


def _sharding(leaf: Leaf, found: Hardware) -> Sharding:
    assert found.devices is not None
    entry = leaf.entry
    if isinstance(entry, NamedSharding):
        return entry
    if isinstance(entry, Layout):
        return entry.sharding(found.devices)
    strategy = (1,) * len(leaf.shape) if entry is AUTO else check(leaf, found.count, [])
    if strategy is None:
        fail(StrategyError, f"`{leaf.path}` has the entry {short(entry)}", where=leaf.source, why="it gives no strategy",
             fix="write a tuple of ints, None, a Layout or a NamedSharding")  # fmt: skip
    return Layout.from_strategy(strategy, found.count).sharding(found.devices)

"""`load_distributed_checkpoint`: load a training checkpoint into the layout of inference; each device reads its shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import tree_util

from shardfn.checkpoint import reader, state_tree
from shardfn.checkpoint.arrays import ArrayRead
from shardfn.checkpoint.contents import StoredArray
from shardfn.checkpoint.reader import Renamed
from shardfn.errors import CheckpointError, NotAvailableError, Problem, a, fail, raise_problems, warn
from shardfn.frontend.callee import Callee
from shardfn.frontend.paths import listed
from shardfn.frontend.strategy import short
from shardfn.mindspore import context
from shardfn.mindspore.inference.predict import PredictLayout, with_options
from shardfn.mindspore.inference.sources import Source, one_of, open_source
from shardfn.mindspore.inference.targets import shardings
from shardfn.mindspore.inference.weights import Named, Weights, check_named, matched, of_module, of_tree


def load_distributed_checkpoint(
    network: Any,
    checkpoint_filenames: Any = None,
    predict_strategy: Any = None,
    train_strategy_filename: Any = None,
    strict_load: bool = False,
    dec_key: Any = None,
    dec_mode: str = "AES-GCM",
    format: str | None = None,
    unified_safetensors_dir: Any = None,
    dst_safetensors_dir: Any = None,
    rank_id: int | None = None,
    output_format: str = "safetensors",
    name_map: Mapping[str, str] | None = None,
    max_process_num: int = 64,
    return_param_dict: bool = False,
    *,
    weights: Named = None,
    like: Any = None,
    step: int | None = None,
    dtype: Any = None,
    device: Any = None,
) -> Any:
    """Load the weights of a training checkpoint with the shardings of inference; each process reads its devices' shards.

    Args:
      network: the served function. A module or a `Cell` gets the weights; for a function they are returned.
      checkpoint_filenames: the files of a MindSpore run (`.ckpt` or safetensors), as a list in rank order or as the folder
        with `rank_0`, …; one file of unsharded arrays; safetensors with an index or in a folder; or a folder of
        `checkpoint.save`, without its optimizer state and counters.
      predict_strategy: the shardings of the weights: a result of `infer_predict_layout`, a plan, a layout file or the name of
        a recipe, MindSpore's strategy JSON, entries by path glob as in `parameter_plan`, an entry or a pytree prefix of
        entries, or shardings. Tuples of ints get a mesh for each array. None: all on one device.
      train_strategy_filename: the strategy file of the training run, JSON or ProtoBuf, for the files of ranks; None is the
        context's `strategy_ckpt_config`. For a checkpoint of `checkpoint.save` it must agree with the recorded strategies.
      strict_load: whether names and dtypes must be those of the weights. Otherwise a stored name may have a prefix, floats are
        cast to floats, and a missing weight keeps its value, with a warning.
      format: "safetensors", "ckpt", or None to detect it.
      unified_safetensors_dir: a folder of safetensors, instead of `checkpoint_filenames`.
      name_map: new names of stored arrays or containers: {"ema": "params"}.
      return_param_dict: return a flat dict by name instead.
      dec_key: MindSpore's; an error if set.
      dec_mode: MindSpore's; an error if set.
      dst_safetensors_dir: MindSpore's; an error if set.
      rank_id: MindSpore's; an error if set.
      output_format: MindSpore's; an error if set.
      max_process_num: MindSpore's; an error if set.
      weights: the name of the argument with the weights, as in `infer_predict_layout`.
      like: the weights' structure, shapes and dtypes, where `predict_strategy` does not come from `infer_predict_layout`.
      step: which step of a folder of steps; the last if None.
      dtype: the dtype of floats, or dtypes by glob; None keeps the dtypes of `like` or of the function's weights.
      device: the devices of a strategy that names none, as in `shard`.

    Returns:
      The weights, in the structure of the function's argument if it is known, else in dicts and lists as stored. For a module,
      the module with other arrays, or a copy of an immutable one.

    Raises:
      CheckpointError: missing weights, other shapes or dtypes, all together; no such checkpoint.
      CheckpointFileError: damaged files, by name.
      NotAvailableError: arguments of MindSpore without a meaning here, all together.
      ShardError: the strategy does not fit.

    >>> import tempfile, jax, jax.numpy as jnp
    >>> from shardfn.checkpoint import save
    >>> def serve(params, x): return x @ params["w"]
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = save(run, {"params": {"w": jnp.ones((8, 4))}, "step": 3})
    ...     load_distributed_checkpoint(serve, run)["w"].shape
    (8, 4)
    """
    asked = {"dec_key": dec_key, "dec_mode": dec_mode, "dst_safetensors_dir": dst_safetensors_dir, "rank_id": rank_id,
             "output_format": output_format, "max_process_num": max_process_num}  # fmt: skip
    _refuse(asked, format, strict_load, return_param_dict)
    found = one_of(checkpoint_filenames, unified_safetensors_dir)
    check_named(weights)
    function, _ = with_options(network, {})
    known = _known(function.callee, predict_strategy, like, weights)
    loaded = context.current().strategy_ckpt_config.load_file
    source = open_source(found, train_strategy_filename, step, format, loaded)
    named = reader.rename_arrays(source.contents.entries, _spelled(name_map, source.contents.entries))
    if known is None:
        chosen = _all_of(named, _argument(function.callee, weights))
    else:
        by_path = {row.new.path: row for row in named}
        stored = {path: row.stored for path, row in by_path.items()}
        places = matched(stored, known, strict_load, source.text, tuple(known.values))
        chosen = [_under(by_path[path], name) for name, path in places.items()]
        if kept := [name for name in known.shapes if name not in places]:
            them = "it stays as it is" if len(kept) == 1 else "they stay as they are"
            warn(f"{source.text} has no {listed(kept)}: {them}")
    values = _read(source, chosen, known, predict_strategy, device, dtype)
    if known is not None:
        values = {name: values[name] if name in values else known.values[name] for name in known.shapes}
        if function.callee.adapter is not None and known.treedef is None:
            return _into(function.callee, values, return_param_dict)
    if return_param_dict:
        return values
    if known is not None and known.treedef is not None:
        return tree_util.tree_unflatten(known.treedef, list(values.values()))
    return state_tree.nested({row.new.keys: values[row.new.path] for row in chosen})


MEANINGLESS: dict[str, tuple[Any, str, str]] = {
    "dec_key": (None, "checkpoints are not encrypted here", "decrypt the files first"),
    "dec_mode": ("AES-GCM", "checkpoints are not encrypted here", "leave it out"),
    "dst_safetensors_dir": (
        None, "weights are loaded, not written", "use transform_checkpoints or checkpoint.export_safetensors"),
    "rank_id": (None, "each process reads for its own devices", "leave it out"),
    "output_format": ("safetensors", "weights are loaded, not written", "use checkpoint.export_safetensors"),
    "max_process_num": (64, "files are read in threads of this process", "leave it out"),
}  # fmt: skip
"""MindSpore's arguments that can only have their default here, why, and what to do instead."""


def _refuse(settings: Mapping[str, Any], form: Any, strict: Any, flat: Any) -> None:
    problems = [
        Problem(f"`{name}` has no meaning here", name if name == "dec_key" else f"{name} = {short(value)}", why, fix)
        for name, (default, why, fix) in MEANINGLESS.items()
        if (value := settings[name]) != default
    ]
    if form not in (None, "safetensors", "ckpt"):
        problems.append(Problem(f"the format {short(form)} is not read", where=f"format = {short(form)}",
                                why='there are "safetensors" and "ckpt"', fix="leave it out"))  # fmt: skip
    raise_problems(problems, NotAvailableError)
    raise_problems([
        Problem(f"`{name}` must be a bool, not {a(value)}", where=f"{name} = {short(value)}", fix="write True or False",
                is_type=True)
        for name, value in (("strict_load", strict), ("return_param_dict", flat)) if not isinstance(value, bool)
    ])  # fmt: skip


def _known(callee: Callee, strategy: Any, like: Any, named: Named) -> Weights | None:
    """Names, shapes and structure of the weights, from what is known without a call."""
    held = of_module(callee) if named is None else None
    if held is not None and like is not None:
        fail(CheckpointError, f"`like` and {callee.name} both say what the weights are", where=f"like = {short(like)}",
             why="a module holds its weights", fix="leave like out")  # fmt: skip
    if held is not None:
        return held
    argument = _argument(callee, named)
    if like is not None:
        return of_tree(like, (argument,) if argument else ())
    return strategy.weights if isinstance(strategy, PredictLayout) else None


def _argument(callee: Callee, named: Named) -> str:
    """The name of the argument that is the weights; the first of the function if nobody says."""
    if isinstance(named, str):
        return named
    return "" if named or callee.signature is None else next(iter(callee.signature.parameters), "")


def _spelled(name_map: Any, entries: Sequence[StoredArray]) -> dict[str, str]:
    """`name_map` with the separators of the paths, which in safetensors files are dots."""
    if name_map is None:
        return {}
    if not isinstance(name_map, Mapping):
        fail(CheckpointError, f"`name_map` is {a(name_map)}", where=f"name_map = {short(name_map)}",
             why="it has new names by stored ones", fix='write {"stored/name": "name"}')  # fmt: skip
    found = {}
    for old, new in ((str(key), str(value)) for key, value in name_map.items()):
        if not any(f"{entry.path}/".startswith(f"{old}/") for entry in entries):
            old, new = old.replace(".", "/"), new.replace(".", "/")
        found[old] = new
    return found


def _under(row: Renamed, name: str, depth: int = 0) -> Renamed:
    """An array under another name, without the first `depth` keys of its place."""
    return Renamed(row.stored, dataclasses.replace(row.new, path=name, keys=row.new.keys[depth:]))


def _all_of(named: list[Renamed], argument: str) -> list[Renamed]:
    """What stands under the argument's name; everything where nothing does."""
    head = f"{argument}/"
    under = [_under(row, row.new.path.removeprefix(head), 1) for row in named if row.new.path.startswith(head)]
    return under if argument and under else named


def _read(
    source: Source, chosen: Sequence[Renamed], known: Weights | None, strategy: Any, device: Any, dtype: Any
) -> dict[str, Any]:
    asked = [row.new for row in chosen]
    shapes = {e.path: jax.ShapeDtypeStruct(e.shape, e.numpy_dtype) for e in asked}
    if known is not None and known.treedef is not None and len(shapes) == len(known.shapes):
        tree = tree_util.tree_unflatten(known.treedef, [shapes[name] for name in known.shapes])
    elif known is not None:
        tree = shapes
    else:
        tree = state_tree.nested({e.keys: shapes[e.path] for e in asked})
    placed = shardings(strategy, asked, tree, device)
    wanted = {} if known is None else {name: shape.dtype for name, shape in known.shapes.items()}
    casts = reader.casts(asked, wanted, dtype)
    values = source.read([ArrayRead(old, placed[new.path], casts[new.path]) for old, new in chosen])
    return {e.path: state_tree.restore_leaf(e.kind, value) for e, value in zip(asked, values, strict=True)}


def _into(callee: Callee, values: Mapping[str, Any], flat: bool) -> Any:
    adapter = callee.adapter
    assert adapter is not None
    try:
        callee.write(dict(values))
        owner = callee.owner
    except TypeError:  # an immutable pytree
        owner = adapter.rebuild(callee.owner, dict(values))
    return dict(values) if flat else owner

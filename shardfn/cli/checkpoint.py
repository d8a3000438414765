"""`python -m shardfn checkpoint inspect | verify | relayout | merge | import | export | transform`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardfn import checkpoint
from shardfn.checkpoint.offline import MEMORY
from shardfn.errors import CheckpointError, fail
from shardfn.mindspore.rank_checkpoints import transform_checkpoints


class Command(NamedTuple):
    """A command: what it does, what it runs, its places by name and its options by flag."""

    text: str
    run: Callable[[argparse.Namespace], None]
    places: Mapping[str, str]
    options: Mapping[str, Mapping[str, Any]]


def add(commands: Any) -> None:
    """Add `checkpoint` and its own commands to those of the command line."""
    parser = commands.add_parser(
        "checkpoint", help="look into checkpoints, and copy them into other layouts and formats"
    )
    rows = parser.add_subparsers(required=True, metavar=" | ".join(COMMANDS))
    for name, command in COMMANDS.items():
        row = rows.add_parser(name, help=command.text, description=f"{command.text[0].upper()}{command.text[1:]}.")
        for place, meaning in command.places.items():
            row.add_argument(place, help=meaning)
        for flag, settings in command.options.items():
            row.add_argument(flag, **settings)
        row.set_defaults(command=command.run, platform="cpu")


def _picked(options: argparse.Namespace) -> dict[str, Any]:
    return {"step": options.step, "only": options.only, "name_map": _names(options.rename), "dtype": options.dtype,
            "memory": options.memory}  # fmt: skip


def _names(rows: list[str] | None) -> dict[str, str] | None:
    for row in rows or ():
        if "=" not in row:
            why = "it gives a new path to an old one"
            fail(CheckpointError, f"--rename {row} has no =", why=why, fix="write old=new")
    return None if rows is None else dict(row.split("=", 1) for row in rows)


def _inspect(options: argparse.Namespace) -> None:
    print(checkpoint.inspect(options.path, options.step))


def _verify(options: argparse.Namespace) -> None:
    print(checkpoint.verify(options.path, options.step))


def _relayout(options: argparse.Namespace) -> None:
    picked = _picked(options)
    print(checkpoint.relayout(options.source, options.target, options.layout, devices=options.count, **picked))


def _merge(options: argparse.Namespace) -> None:
    print(checkpoint.merge(options.source, options.target, **_picked(options)))


def _import(options: argparse.Namespace) -> None:
    print(checkpoint.import_safetensors(
        options.source, options.target, options.layout, devices=options.count, step=options.step or 0,
        name_map=_names(options.rename), memory=options.memory))  # fmt: skip


def _export(options: argparse.Namespace) -> None:
    picked = _picked(options)
    files = checkpoint.export_safetensors(options.path, options.target, file_bytes=options.file_bytes, **picked)
    print(*files, sep="\n")


def _transform(options: argparse.Namespace) -> None:
    files = transform_checkpoints(options.source, options.target, options.prefix, options.source_strategy,
                                  options.target_strategy, memory=options.memory)  # fmt: skip
    print(*files, sep="\n")


STEP = {"--step": {"type": int, "metavar": "N", "help": "which step; the last if left out"}}
RENAME = {"--rename": {"nargs": "+", "metavar": "OLD=NEW", "help": "new paths, of arrays or of containers"}}
BOUND = {
    "--memory": {"default": MEMORY, "metavar": "BYTES", "help": "what may be in memory at once; 512MiB if left out"}
}
PICK = {
    **STEP,
    "--only": {"nargs": "+", "metavar": "GLOB", "help": "the arrays to take, by path"},
    **RENAME,
    "--dtype": {"metavar": "NAME", "help": "what floating-point arrays are cast to: bfloat16"},
    **BOUND,
}
DEVICES = {
    "--devices": {"dest": "count", "type": int, "metavar": "N", "help": "how many, where the layout leaves it open"}
}
FOLDER = {"path": "the folder of a checkpoint"}
COPY = {"source": "the folder of a checkpoint", "target": "another folder"}

COMMANDS = {
    "inspect": Command("what a checkpoint holds", _inspect, FOLDER, STEP),
    "verify": Command("read a checkpoint through and check its checksums", _verify, FOLDER, STEP),
    "relayout": Command(
        "copy a checkpoint into another layout, without its devices", _relayout, COPY,
        {"--layout": {"required": True, "metavar": "FILE", "help": "a layout file, or the name of a recipe"}, **DEVICES, **PICK}),
    "merge": Command("copy a checkpoint for one device, every array unsharded", _merge, COPY, PICK),
    "import": Command(
        "make a checkpoint of safetensors files", _import,
        {"source": "a file, an index of files, or a folder", "target": "the folder of the checkpoint"},
        {"--layout": {"metavar": "FILE", "help": "a layout file or the name of a recipe; unsharded if left out"},
         **DEVICES, **STEP, **RENAME, **BOUND}),
    "export": Command(
        "write a checkpoint as safetensors", _export, {**FOLDER, "target": "model.safetensors, or a folder"},
        {"--file-bytes": {"default": "5GB", "metavar": "BYTES", "help": "how large a file may be; 5GB if left out"}, **PICK}),
    "transform": Command(
        "rewrite the safetensors files of the ranks of a MindSpore run for another strategy", _transform,
        {"source": "a folder with rank_0, rank_1, …", "target": "where the same is written"},
        {"--prefix": {"default": "checkpoint", "help": "what the files are called, before the rank"},
         "--source-strategy": {"metavar": "JSON", "help": "the strategy file of the run that wrote them"},
         "--target-strategy": {"metavar": "JSON", "help": "that of the run to come; one device if left out"}, **BOUND}),
}  # fmt: skip

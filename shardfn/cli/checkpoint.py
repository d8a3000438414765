"""`python -m shardfn checkpoint inspect | verify | relayout | merge | import | export | transform`."""

from __future__ import annotations

import argparse
from typing import Any

from shardfn import checkpoint
from shardfn.checkpoint.offline import MEMORY
from shardfn.errors import CheckpointError, fail
from shardfn.mindspore.rank_checkpoints import transform_checkpoints


def add(commands: Any) -> None:
    """Add `checkpoint` and its own commands to those of the command line."""
    parser = commands.add_parser(
        "checkpoint", help="look into checkpoints, and copy them into other layouts and formats"
    )
    rows = parser.add_subparsers(
        required=True, metavar="inspect | verify | relayout | merge | import | export | transform"
    )
    for add_row in (_inspect, _verify, _relayout, _merge, _import, _export, _transform):
        add_row(rows)


def _row(rows: Any, name: str, command: Any, text: str, *places: tuple[str, str]) -> argparse.ArgumentParser:
    row = rows.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    for place, meaning in places:
        row.add_argument(place, help=meaning)
    row.set_defaults(command=command, platform="cpu")
    return row


def _options(row: argparse.ArgumentParser, *names: str) -> None:
    known: dict[str, dict[str, Any]] = {
        "--step": {"type": int, "metavar": "N", "help": "which step; the last if left out"},
        "--only": {"nargs": "+", "metavar": "GLOB", "help": "the arrays to take, by path"},
        "--rename": {"nargs": "+", "metavar": "OLD=NEW", "help": "new paths, of arrays or of containers"},
        "--dtype": {"metavar": "NAME", "help": "what floating-point arrays are cast to: bfloat16"},
        "--memory": {"default": MEMORY, "metavar": "BYTES", "help": "what may be in memory at once; 512MiB if left out"},
        "--devices": {"dest": "count", "type": int, "metavar": "N", "help": "how many, where the layout leaves it open"},
    }  # fmt: skip
    for name in names:
        row.add_argument(name, **known[name])


PICK = ("--step", "--only", "--rename", "--dtype", "--memory")
FOLDER = ("path", "the folder of a checkpoint")


def _picked(options: argparse.Namespace) -> dict[str, Any]:
    return {"step": options.step, "only": options.only, "name_map": _names(options.rename), "dtype": options.dtype,
            "memory": options.memory}  # fmt: skip


def _names(rows: list[str] | None) -> dict[str, str] | None:
    for row in rows or ():
        if "=" not in row:
            fail(
                CheckpointError,
                f"--rename {row} has no =",
                why="it gives a new path to an old one",
                fix="write old=new",
            )
    return None if rows is None else dict(row.split("=", 1) for row in rows)


def _inspect(rows: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        print(checkpoint.inspect(options.path, options.step))

    _options(_row(rows, "inspect", run, "what a checkpoint holds", FOLDER), "--step")


def _verify(rows: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        checkpoint.verify(options.path, options.step)
        print(f"{options.path}: complete, every checksum is right")

    _options(_row(rows, "verify", run, "read a checkpoint through and check every byte", FOLDER), "--step")


def _relayout(rows: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        print(
            checkpoint.relayout(
                options.source, options.target, options.layout, devices=options.count, **_picked(options)
            )
        )

    row = _row(rows, "relayout", run, "copy a checkpoint into another layout, without its devices",
               ("source", "the folder of a checkpoint"), ("target", "another folder"))  # fmt: skip
    row.add_argument("--layout", required=True, metavar="FILE", help="a layout file, or the name of a recipe")
    _options(row, "--devices", *PICK)


def _merge(rows: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        print(checkpoint.merge(options.source, options.target, **_picked(options)))

    _options(_row(rows, "merge", run, "copy a checkpoint for one device, every array unsharded",
                  ("source", "the folder of a checkpoint"), ("target", "another folder")), *PICK)  # fmt: skip


def _import(rows: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        print(
            checkpoint.import_safetensors(
                options.source,
                options.target,
                options.layout,
                devices=options.count,
                step=options.step or 0,
                name_map=_names(options.rename),
                memory=options.memory,
            )
        )

    row = _row(rows, "import", run, "make a checkpoint of safetensors files",
               ("source", "a file, an index of files, or a folder"), ("target", "the folder of the checkpoint"))  # fmt: skip
    row.add_argument("--layout", metavar="FILE", help="a layout file or the name of a recipe; unsharded if left out")
    _options(row, "--devices", "--step", "--rename", "--memory")


def _export(rows: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        for file in checkpoint.export_safetensors(
            options.path, options.target, file_bytes=options.file_bytes, **_picked(options)
        ):
            print(file)

    row = _row(rows, "export", run, "write a checkpoint as safetensors", FOLDER,
               ("target", "model.safetensors, or a folder"))  # fmt: skip
    row.add_argument("--file-bytes", default="5GB", metavar="BYTES", help="how large a file may be; 5GB if left out")
    _options(row, *PICK)


def _transform(rows: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        for file in transform_checkpoints(options.source, options.target, options.prefix, options.source_strategy,
                                                     options.target_strategy, memory=options.memory):  # fmt: skip
            print(file)

    row = _row(rows, "transform", run, "rewrite the safetensors files of the ranks of a MindSpore run for another strategy",
               ("source", "a folder with rank_0, rank_1, …"), ("target", "where the same is written"))  # fmt: skip
    row.add_argument("--prefix", default="checkpoint", help="what the files are called, before the rank")
    row.add_argument("--source-strategy", metavar="JSON", help="the strategy file of the run that wrote them")
    row.add_argument("--target-strategy", metavar="JSON", help="that of the run to come; one device if left out")
    _options(row, "--memory")

"""Checkpoints that change layout: saved under one, restored under any other, on other devices, in other processes."""

from shardfn.checkpoint.catalogue import Inspection, inspect, steps
from shardfn.checkpoint.interchange import export_safetensors, import_safetensors
from shardfn.checkpoint.offline import Copied, merge, relayout, verify
from shardfn.checkpoint.reader import Reads, reads, restore
from shardfn.checkpoint.writer import save
from shardfn.errors import CheckpointError, CheckpointFileError
from shardfn.mindspore.rank_checkpoints import merge_sliced_parameter, rank_list_for_transform, transform_checkpoints

__all__ = [
    "CheckpointError",
    "CheckpointFileError",
    "Copied",
    "Inspection",
    "Reads",
    "export_safetensors",
    "import_safetensors",
    "inspect",
    "merge",
    "merge_sliced_parameter",
    "rank_list_for_transform",
    "reads",
    "relayout",
    "restore",
    "save",
    "steps",
    "transform_checkpoints",
    "verify",
]

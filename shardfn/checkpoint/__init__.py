"""Checkpoints that change layout: saved under one, restored under any other, on other devices, in other processes."""

from shardfn.checkpoint.interchange import export_safetensors, import_safetensors
from shardfn.checkpoint.mindspore import merge_sliced_parameter, rank_list_for_transform, transform_checkpoints
from shardfn.checkpoint.offline import Copied, merge, relayout, verify
from shardfn.checkpoint.restoring import Reads, reads, restore
from shardfn.checkpoint.saving import save
from shardfn.checkpoint.stored import Inspection, inspect, steps
from shardfn.errors import CheckpointError, CheckpointFileError

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

"""Checkpoints that change layout: saved under one, restored under any other, on other devices, in other processes."""

from shardfn.checkpoint.offline import CopyResult, merge, relayout, verify
from shardfn.checkpoint.reader import RestoreReads, reads, restore
from shardfn.checkpoint.safetensors import export_safetensors, import_safetensors
from shardfn.checkpoint.step_folders import Inspection, inspect, steps
from shardfn.checkpoint.writer import save
from shardfn.errors import CheckpointError, CheckpointFileError

__all__ = [
    "CheckpointError",
    "CheckpointFileError",
    "CopyResult",
    "Inspection",
    "RestoreReads",
    "export_safetensors",
    "import_safetensors",
    "inspect",
    "merge",
    "reads",
    "relayout",
    "restore",
    "save",
    "steps",
    "verify",
]

"""Checkpoints that change layout: saved under one, restored under any other, on other devices, in other processes."""

from shardfn.checkpoint.interchange import export_safetensors, import_safetensors
from shardfn.checkpoint.offline import Copied, merge, relayout, verify
from shardfn.checkpoint.restoring import Reads, reads, restore
from shardfn.checkpoint.saving import save
from shardfn.checkpoint.stored import steps

__all__ = [
    "Copied",
    "Reads",
    "export_safetensors",
    "import_safetensors",
    "merge",
    "reads",
    "relayout",
    "restore",
    "save",
    "steps",
    "verify",
]

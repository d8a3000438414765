"""Sharded checkpoints: saved under one sharding, restored under any other, on any number of devices and processes.

| module | holds |
|---|---|
| `writer`, `orbax_store` | `save`; step folders, retention and background saves with Orbax |
| `orbax_arrays`, `failure` | arrays as the files of an Orbax checkpoint; what processes tell each other when one fails |
| `reader`, `targets` | `restore`; the sharding of each restored array |
| `offline` | `relayout`, `merge` and `verify`, without devices |
| `safetensors`, `safetensors_files` | export and import of safetensors; its file format |
| `step_folders` | `steps`, `inspect`; paths of steps |
| `contents`, `catalogue` | the description of a checkpoint; how it is read from Orbax's files |
| `arrays`, `chunks` | arrays read with TensorStore; the shapes of files and chunks |
| `state_tree` | a pytree as arrays by path, and back |
"""

from typing import Any

from shardfn.checkpoint.offline import CopyResult, VerifyResult, merge, relayout, verify
from shardfn.checkpoint.reader import RestoreReads, reads, restore
from shardfn.checkpoint.safetensors import export_safetensors, import_safetensors
from shardfn.checkpoint.step_folders import Inspection, inspect, steps
from shardfn.checkpoint.writer import save
from shardfn.errors import CheckpointError, CheckpointFileError
from shardfn.frontend.other_words import missing


def __getattr__(name: str) -> Any:
    raise missing(__name__, name, __all__)


__all__ = [
    "CheckpointError",
    "CheckpointFileError",
    "CopyResult",
    "Inspection",
    "RestoreReads",
    "VerifyResult",
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

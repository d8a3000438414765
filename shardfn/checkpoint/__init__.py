"""Checkpoints that change layout: saved under one, restored under any other, on other devices, in other processes."""

from shardfn.checkpoint.saving import save
from shardfn.checkpoint.stored import steps

__all__ = ["save", "steps"]

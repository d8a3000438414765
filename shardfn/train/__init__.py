"""Training: a step built from a loss function and an optax optimizer, on one device or many.

>>> from shardfn import train
>>> train.step.__name__
'step'
"""

from shardfn.train.marks import staged
from shardfn.train.optimizer_parallel import OptimizerParallel
from shardfn.train.pipeline import Pipeline, pipeline
from shardfn.train.recompute import communicated, recompute
from shardfn.train.rows import Packed
from shardfn.train.state import State
from shardfn.train.step import TrainingStep, step

__all__ = [
    "OptimizerParallel", "Packed", "Pipeline", "State", "TrainingStep", "communicated", "pipeline", "recompute", "staged",
    "step",
]  # fmt: skip

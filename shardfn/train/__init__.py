"""Training: a step built from a loss function and an optax optimizer, on one device or many.

>>> from shardfn import train
>>> train.step.__name__
'step'
"""

from shardfn.train.optimizer_parallel import OptimizerParallel
from shardfn.train.state import State
from shardfn.train.step import TrainingStep, step

__all__ = ["OptimizerParallel", "State", "TrainingStep", "step"]

"""Training: a step built from a loss function and an optax optimizer, on one device or many.

>>> from shardfn import train
>>> train.step.__name__
'step'
"""

from shardfn.runtime.extras import need

need("optax", "train")  # an error that names the extra, before the modules that import it

from shardfn.train.pipelines.flat_parameters import Packed
from shardfn.train.pipelines.marks import staged
from shardfn.train.pipelines.pipeline import Pipeline, pipeline
from shardfn.train.remat import communicated, recompute
from shardfn.train.steps.optimizer_parallel import OptimizerParallel
from shardfn.train.steps.state import State
from shardfn.train.steps.step import TrainingStep, step

__all__ = [
    "OptimizerParallel", "Packed", "Pipeline", "State", "TrainingStep", "communicated", "pipeline", "recompute", "staged",
    "step",
]  # fmt: skip

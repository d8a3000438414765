"""Training: a jitted step from a loss function and an optax optimizer, on one device or many.

`steps` builds the training step and its shardings, `collectives` fuses reductions and gathers into buckets, `pipelines`
runs a loss in pipeline stages, `scan_layers` scans repeated layers, and `remat` rematerialises activations.

>>> from shardfn import train
>>> train.step.__name__
'step'
"""

from shardfn.runtime.extras import need

need("optax", "train")  # an error that names the extra, before the modules that import it

from shardfn.train.collectives import fused_all_gather, fused_psum
from shardfn.train.pipelines.flat_parameters import PackedParameters
from shardfn.train.pipelines.pipeline import Pipeline, pipeline
from shardfn.train.pipelines.stage_marks import staged
from shardfn.train.remat import communicated, recompute
from shardfn.train.steps.shardings import OptimizerParallel
from shardfn.train.steps.state import TrainState
from shardfn.train.steps.step import step
from shardfn.train.steps.table_step import TableStep
from shardfn.train.steps.train_step import TrainStep

__all__ = [
    "OptimizerParallel", "PackedParameters", "Pipeline", "TableStep", "TrainState", "TrainStep", "communicated",
    "fused_all_gather", "fused_psum", "pipeline", "recompute", "staged", "step",
]  # fmt: skip

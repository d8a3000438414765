"""Inference: the layout of each weight of a served function, and training checkpoints loaded into it."""

from shardfn.mindspore.inference.loading import load_distributed_checkpoint
from shardfn.mindspore.inference.predict import PredictLayout, WeightLayout, infer_predict_layout

__all__ = ["PredictLayout", "WeightLayout", "infer_predict_layout", "load_distributed_checkpoint"]

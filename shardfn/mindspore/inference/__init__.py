"""Inference: where each weight lies when a function is served, and a training checkpoint loaded into that."""

from shardfn.mindspore.inference.loading import load_distributed_checkpoint
from shardfn.mindspore.inference.predict import PredictLayout, WeightLayout, infer_predict_layout

__all__ = ["PredictLayout", "WeightLayout", "infer_predict_layout", "load_distributed_checkpoint"]

"""Hugging Face models as this library uses them: loading, value heads, folders on disk, FLOPs."""

from verl.models.config import load_model_config
from verl.models.flops import ModelFlops, device_peak_flops
from verl.models.loading import load_causal_lm, load_value_model
from verl.models.weights import count_parameters, export_weights, load_weights

__all__ = [
    "ModelFlops",
    "count_parameters",
    "device_peak_flops",
    "export_weights",
    "load_causal_lm",
    "load_model_config",
    "load_value_model",
    "load_weights",
]

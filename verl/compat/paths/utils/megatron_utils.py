"""Megatron's models under upstream's path."""

from typing import Any

from verl.compat import absent_names

__getattr__ = absent_names(__name__)


def unwrap_model(model: Any, module_instances: Any = None) -> Any:
    """The model inside wrappers that keep it as ``module``; of a list, each."""
    if isinstance(model, list):
        return [unwrap_model(one, module_instances) for one in model]
    while hasattr(model, "module") and (module_instances is None or isinstance(model, module_instances)):
        model = model.module
    return model


def get_model_config(model: Any) -> Any:
    """The configuration of the model inside the wrappers."""
    return unwrap_model(model).config

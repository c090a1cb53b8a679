"""Models, position ids and masks under the path that users' code imports them from."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verl.compat import absent_names
from verl.compat.forms.sequences import compute_position_id_with_mask, create_random_mask
from verl.models.config import apply_overrides
from verl.models.generation_settings import get_generation_config
from verl.models.loading import load_value_model
from verl.models.weights import count_parameters, names_on_disk

__getattr__ = absent_names(__name__)


def print_model_size(model: nn.Module, name: str | None = None) -> None:
    """Print how many parameters there are."""
    print(f"{name or type(model).__name__} has {count_parameters(model) / 1e9:.3f} B parameters")


def update_model_config(module_config: Any, override_config_kwargs: Mapping[str, Any]) -> None:
    """Set attributes of a model's configuration."""
    apply_overrides(module_config, override_config_kwargs, strict=False)


def convert_weight_keys(state_dict: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Weights that the model has in memory, under their Hugging Face names."""
    return names_on_disk(model, state_dict)


def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> nn.Module:
    """A model with a scalar head on every position; ``model_config`` is read from the folder."""
    return load_value_model(local_path, torch_dtype, trust_remote_code=trust_remote_code)


def extract_multi_modal_inputs(batch_data: Any, indices: Any = None) -> dict[str, Any]:
    """The tensors of the rows' ``multi_modal_inputs`` (of ``indices`` alone), joined by name."""
    rows = [batch_data[int(i)] for i in indices] if indices is not None else list(batch_data)
    rows = [getattr(row, "data", row) or {} for row in rows]
    return {name: torch.cat([row[name] for row in rows if name in row]) for row in rows for name in row}

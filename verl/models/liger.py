"""Liger's kernels for a model's norms, rotary embeddings and gated layers (``model.use_liger``), where installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from verl.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "use_liger"
PACKAGE = "liger_kernel"


def apply_liger(model: PreTrainedModel, device: str) -> None:
    """Replace the modules that Liger has kernels for; its fused loss is left out, `use_fused_kernels` is ours.

    Raises:
        ConfigError: the package is not installed, or there is no GPU for its kernels.
        ModelError: Liger does not know the family.
    """
    if device == "cpu":
        raise ConfigError("Liger's kernels need a GPU", key=KEY, got=True, allowed="False on a CPU")
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            "the package liger-kernel is not installed",
            key=KEY,
            got=True,
            fix="In the checkout: pip install -e '.[liger]'",
        )
    patches = importlib.import_module(f"{PACKAGE}.transformers.monkey_patch")
    family = model.config.model_type
    if family not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        families = sorted(patches.MODEL_TYPE_TO_APPLY_LIGER_FN)
        raise ModelError("Liger has no kernels for this family", key=KEY, got=family, allowed=families)
    patches._apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)

"""Value functions over models that see: tower, language model and a scalar head; transformers has no class for them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForTokenClassification

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def value_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The token-classification class of a family, from its configuration."""
    return _made(AutoModelForImageTextToText._model_mapping[type(config)])


@lru_cache
def _made(seeing: type[PreTrainedModel]) -> type[PreTrainedModel]:
    base = next(kind for kind in seeing.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    name = seeing.__name__.replace("ForConditionalGeneration", "ForTokenClassification")
    renamed = get_checkpoint_conversion_mapping(seeing.__name__)
    if renamed is not None:  # files of older versions name weights otherwise
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    # transformers trusts what it knows of file names only for classes in its own modules.
    return type(name, (GenericForTokenClassification, base), {"__module__": seeing.__module__})

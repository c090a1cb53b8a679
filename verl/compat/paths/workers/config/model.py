"""The section of a model under upstream's path."""

from verl.config import HFModelConfig

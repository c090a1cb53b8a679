"""Attention of trained models: causal rows, packed rows, shared prompts."""

from verl.models.attention.interface import ATTENTION_NAME, AttentionPlan, PackedPlan, enable
from verl.models.attention.masked import AttentionVariant
from verl.models.attention.segments import NO_PREFIX, Segments

__all__ = ["ATTENTION_NAME", "NO_PREFIX", "AttentionPlan", "AttentionVariant", "PackedPlan", "Segments", "enable"]

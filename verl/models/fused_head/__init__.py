"""Log-probabilities and entropies from hidden states, without the logits."""

from verl.models.fused_head.apply import BACKENDS, FusedHead, fusable
from verl.models.fused_head.one_pass import OnePassHead
from verl.models.fused_head.tiled import Shape, TokenStatistics

__all__ = ["BACKENDS", "FusedHead", "OnePassHead", "Shape", "TokenStatistics", "fusable"]

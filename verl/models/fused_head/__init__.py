"""Log-probabilities and entropies from hidden states, without the logits."""

from verl.models.fused_head.apply import BACKENDS, FusedHead, fusable
from verl.models.fused_head.tiled import Shape, TokenStatistics

__all__ = ["BACKENDS", "FusedHead", "Shape", "TokenStatistics", "fusable"]

"""Log-probabilities and entropies from hidden states, without the logits."""

from verl.models.fused_head.apply import BACKENDS, FusedHead, fusable
from verl.models.fused_head.one_sweep import OneSweep
from verl.models.fused_head.tiled import Shape, TokenStatistics

__all__ = ["BACKENDS", "FusedHead", "OneSweep", "Shape", "TokenStatistics", "fusable"]

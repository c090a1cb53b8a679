"""Checkpoints of a module and an optimizer of one's own, under upstream's path."""

from verl.engines.by_hand import FSDPCheckpointManager

"""Checkpoints of a module and an optimizer of one's own, under upstream's path."""

from verl.compat.forms.fsdp2 import FSDPCheckpointManager

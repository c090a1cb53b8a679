"""The actor over Megatron-Core, under upstream's path."""

from verl.workers.by_hand import MegatronPPOActor

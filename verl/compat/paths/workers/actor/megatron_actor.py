"""The actor over Megatron-Core, under upstream's path."""

from verl.compat.forms.actors import MegatronPPOActor

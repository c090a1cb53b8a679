"""Activations in host memory, under upstream's path."""

from typing import Any

from verl.engines.activations import host_activations


def enable_activation_offloading(model: Any, strategy: str = "fsdp", enable_ckpt: bool = False) -> None:
    """From now on what a forward pass keeps for the backward one waits on the host; ``enable_ckpt``: layers' inputs."""
    if enable_ckpt:
        model.gradient_checkpointing_enable()
    parameters = list(model.parameters())
    forward = model.forward

    if kept := host_activations(True, parameters, parameters[0].device.type):

        def moved(*args: Any, **kwargs: Any) -> Any:
            with kept.offloaded_activations():
                return forward(*args, **kwargs)

        model.forward = moved

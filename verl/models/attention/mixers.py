"""Token mixers other than attention in a packed row: state-space models, linear attention, short convolutions.

A mixer carries a state from each token to the next, and through a packed row it would carry it from one sequence into
another. So it gets the sequences as the rows of a batch: every state starts at zero, and a row is padded behind its
tokens, where nothing reads it. A prompt that several responses share is computed by the mixers once for each
of them, because each continues its state; everything else computes it once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl.errors import ModelError
from verl.models.attention.segments import Segments
from verl.models.layers import transformer_layers


class MixerForward:
    """What stands in for the forward pass of a mixer.

    Args:
        original: the mixer's own forward pass, (B, L, H) -> (B, L, H).

    Attributes:
        segments: of the packed row that its layer computes now; None where rows are padded.
    """

    def __init__(self, original: Callable[..., Any]):
        self.original = original
        self.segments: Segments | None = None

    @torch.compiler.disable  # as many calls as there are lengths: compiled layers end in front of them
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.segments is None:
            return self.original(hidden_states, *args, **kwargs)
        tokens, (batches, cells) = hidden_states[0], self.segments.as_batches
        parts = [self.original(tokens[batch], *args, **kwargs) for batch in batches]
        if not all(isinstance(part, Tensor) for part in parts):
            raise ModelError("a mixer that returns more than its tokens cannot compute packed rows")
        return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, cells)[None]


def token_mixers(model: nn.Module) -> list[nn.Module]:
    """The mixers of all layers: modules that convolve over tokens themselves, as each of these families' does."""
    inside = {id(m): m for _, layer in transformer_layers(model) for m in layer.modules()}  # layers may hold layers
    return [m for m in inside.values() if any(isinstance(c, nn.Conv1d) for c in m.children()) and _takes_tokens(m)]


def mixes_by_sequence(model: nn.Module) -> bool:
    """Whether `take_over` was called: the model needs all tokens of a sequence in one place."""
    return any(isinstance(module.forward, MixerForward) for module in model.modules())


def take_over(model: nn.Module, mixers: list[nn.Module]) -> list[Any]:
    """Let mixers compute the sequences of a packed row apart; returns what `give_back` wants.

    Layers hand the plan of their row on, also when they are computed again in the backward pass.
    """
    for mixer in mixers:
        mixer.forward = MixerForward(mixer.forward)
    return [layer.register_forward_pre_hook(_note_segments, with_kwargs=True) for _, layer in transformer_layers(model)]


def give_back(mixers: list[nn.Module], hooks: list[Any]) -> None:
    """Undo `take_over`."""
    for hook in hooks:
        hook.remove()
    for mixer in mixers:
        mixer.forward = mixer.forward.original  # type: ignore[union-attr, attr-defined]


def _note_segments(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    plan = kwargs.get("attention_plan")
    for module in layer.modules():
        if isinstance(module.forward, MixerForward):
            module.forward.segments = None if plan is None else plan.segments


def _takes_tokens(module: nn.Module) -> bool:
    """A mixer whose parts are sharded one by one is none: processes would gather them at different times."""
    if any(isinstance(part, FSDPModule) for part in module.modules() if part is not module):
        return False
    forward = module.forward.original if isinstance(module.forward, MixerForward) else module.forward
    return next(iter(inspect.signature(forward).parameters), "") == "hidden_states"

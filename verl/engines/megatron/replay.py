"""Recorded experts on Megatron-Core's routers: chosen again, also where a layer is computed again, and recorded.

A router of Megatron-Core hands its scores to what stands in its field ``router_replay``; here that is a `LayerReplay`.
Theirs keeps the tokens of all layers of a process in one list, and replays no pass that has tokens without a record.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from verl.engines.megatron.parallel import SECTION
from verl.errors import ConfigError, EngineError, ModelError
from verl.models.router_replay import NO_RECORD, Differing


class LayerReplay:
    """The choices of one router.

    Args:
        number: of its layer among those of the model that have experts.
    """

    def __init__(self, replay: StageReplay, number: int, router: nn.Module):
        self.replay, self.number, self.router = replay, number, router
        self.waiting: deque[Tensor | None] = deque()
        self.chosen: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Megatron-Core's call: (tokens, E) scores -> the chosen ones and their experts, (tokens, top_k) each."""
        assert default_compute_topk is not None, "Megatron-Core says how it would choose"
        values, top = default_compute_topk(scores, topk, num_groups, group_topk)
        recorded, is_again = self._recorded()
        if recorded is None:
            self.chosen = top
            return values, top
        if len(recorded) != len(top):
            message = f"a router was called with {len(top)} tokens, and experts of {len(recorded)} are to be replayed"
            raise EngineError(message)
        if self.router.training and not is_again:
            self.replay.differing.add(recorded, top)
        self.chosen = torch.where(recorded == NO_RECORD, top, recorded)
        return scores.gather(1, self.chosen), self.chosen

    def _recorded(self) -> tuple[Tensor | None, bool]:
        """(tokens, top_k) of this call, and whether it computes a layer again for a backward pass.

        Every schedule goes back through the micro-batches of a stage in the order in which it went forward.
        """
        if not self.replay.is_forward:
            return self.waiting.popleft(), True
        experts = self.replay.experts
        recorded = None if experts is None else experts[:, self.number]
        if self.router.training:
            self.waiting.append(recorded)
        return recorded, False


class StageReplay:
    """Replays in the layers that a rank has, and records what they choose.

    Args:
        chunks: this rank's stages.
        settings: of the family; they say which layers have experts.

    Attributes:
        facts: of each layer with experts, on any rank: how many there are, and how many a token gets.
        experts: (tokens, layers, top_k) of the stage that runs, as its routers see the tokens; None: they choose.
        is_forward: whether a stage runs now; a router that is called otherwise computes its layer again.

    Raises:
        ModelError: the model is dense.
        ConfigError: a fused kernel chooses the experts.
    """

    def __init__(self, chunks: Iterable[nn.Module], settings: Mapping[str, Any]):
        mixed = [n for n, has_experts in enumerate(settings.get("moe_layer_freq") or ()) if has_experts]
        if not mixed:
            message = "the model has no routers whose choice of experts could be recorded or replayed"
            raise ModelError(message, fix="Leave router replay off, and the recording of experts in the sampler.")
        self.facts = [(int(settings["num_moe_experts"]), int(settings["moe_router_topk"]))] * len(mixed)
        self.experts: Tensor | None = None
        self.is_forward = False
        self.differing = Differing()
        self._layers: dict[Any, list[LayerReplay]] = {}
        for chunk in chunks:
            blocks: Any = chunk.decoder.layers  # type: ignore[union-attr]
            mine = [block for block in blocks if hasattr(block.mlp, "router")]
            self._layers[chunk] = [self._placed(mixed.index(b.layer_number - 1), b.mlp.router) for b in mine]

    def _placed(self, number: int, router: Any) -> LayerReplay:
        if router.config.moe_router_fusion:
            message = "the fused router does not ask which experts were recorded"
            key = f"{SECTION}.override_mcore_model_config.moe_router_fusion"
            raise ConfigError(message, key=key, got=True, fix="Set it to false, or leave router replay off.")
        router.router_replay = LayerReplay(self, number, router)
        return router.router_replay  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def in_passes(self) -> Iterator[None]:
        """Around the passes of a call."""
        self.differing.clear()
        self._forget()
        try:
            yield
        finally:
            self._forget()

    def _forget(self) -> None:
        for layer in self._everywhere():
            layer.waiting.clear()
            layer.chosen = None

    def _everywhere(self) -> list[LayerReplay]:
        return [layer for layers in self._layers.values() for layer in layers]

    @contextlib.contextmanager
    def forward(self, experts: Tensor | None) -> Iterator[None]:
        """While a stage runs on a micro-batch with these experts."""
        self.experts, self.is_forward = None if experts is None else experts.long(), True
        try:
            yield
        finally:
            self.experts, self.is_forward = None, False

    def take(self, chunk: nn.Module, tokens: int, device: str | torch.device) -> Tensor:
        """(tokens, layers of the model, top_k) int16 that a stage chose last, `NO_RECORD` for layers of others."""
        experts = torch.full((tokens, len(self.facts), self.facts[0][1]), NO_RECORD, dtype=torch.int16, device=device)
        for layer in self._layers[chunk]:
            assert layer.chosen is not None, "a pass goes through every router of the stage"
            experts[:, layer.number] = layer.chosen.to(torch.int16)
        return experts

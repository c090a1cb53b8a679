"""Router replay: the experts that a mixture chose for each token, recorded, and chosen again in another pass.

A sampler and a trainer differ by rounding, and where a router's scores lie close that makes a token go to another
expert: a small difference becomes a large one. With replay the choice is the recorded one; the weights of the chosen
experts stay those of the router that computes now, so that it gets its gradient (Ma et al. 2025, arXiv 2510.11370).

Nothing here knows a family: a router of transformers returns (logits, weights, experts), and its experts come out of a
top-k of scores. That one call is answered with the recorded experts and their scores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl.errors import EngineError, ModelError
from verl.metrics import MetricSet
from verl.models.routers import Sum, router_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COLUMN = "routed_experts"
"""Column of a batch, and output of a pass: (B, P+T, layers, top_k) int16, `NO_RECORD` where the router is free."""
NO_RECORD = -1
_TOP_K = (torch.topk, torch.Tensor.topk)


def mixture_routers(model: PreTrainedModel) -> list[nn.Module]:
    """The routers of a mixture, in the order of its layers.

    Raises:
        ModelError: the model is dense, or its family does not say which modules are its routers.
    """
    routers = [
        router for router in router_modules(model) if hasattr(router, "top_k") and hasattr(router, "num_experts")
    ]
    if not routers:
        message = f"{type(model).__name__} has no routers whose choice of experts could be recorded or replayed"
        fix = "Leave router replay off, and the recording of experts in the sampler."
        raise ModelError(message, fix=fix)
    return routers


class ExpertRecorder:
    """Records what the routers of a model choose.

    Args:
        model: a mixture.

    Raises:
        ModelError: see `mixture_routers`.
    """

    def __init__(self, model: PreTrainedModel):
        self.routers = mixture_routers(model)
        self._seen: dict[int, Tensor] = {}
        self._records = False
        for layer, router in enumerate(self.routers):
            router.register_forward_hook(partial(self._note, layer))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block a forward pass leaves its choices for `take`."""
        self._seen, self._records = {}, True
        try:
            yield
        finally:
            self._records = False

    @torch.compiler.disable  # a hook with a branch on recording would compile layers twice
    def _note(self, layer: int, module: nn.Module, inputs: Any, out: Any) -> None:
        if self._records:
            self._seen[layer] = routed_experts(module, out).to(torch.int16)

    def take(self) -> Tensor:
        """(tokens, layers, top_k) int16 of the last pass, on its device."""
        assert len(self._seen) == len(self.routers), "a pass goes through every router"
        seen, self._seen = self._seen, {}
        return torch.stack([seen[layer] for layer in range(len(self.routers))], dim=1)


class Differing:
    """Counts replayed choices that the routers which compute would not have made, in training mode."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._counts = [0, 0]

    @torch.no_grad()
    def add(self, recorded: Tensor, routed: Tensor) -> None:
        """(tokens, top_k) replayed, and what the router would have chosen; tokens without a record do not count."""
        replayed = recorded[:, 0] != NO_RECORD
        same = (recorded[replayed][:, :, None] == routed[replayed][:, None, :]).any(-1)
        self._counts[0] += int((~same).sum())
        self._counts[1] += same.numel()

    def metrics(self, sum_over_ranks: Sum = lambda x: x) -> MetricSet:
        """``moe/replay_differs``: the share of these choices. Collective."""
        differing, all_of_them = sum_over_ranks(torch.tensor(self._counts, dtype=torch.float64)).tolist()
        metrics = MetricSet()
        if all_of_them:
            metrics.add("moe/replay_differs", differing / all_of_them)
        return metrics


class RouterReplay(ExpertRecorder):
    """Also chooses recorded experts again, in the passes of a model that belongs to an engine.

    Args:
        model: a mixture; its routers stay wrapped.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self._recorded: Tensor | None = None
        self._place: dict[type, int] = {}
        self.differing = Differing()
        for layer, router in enumerate(self.routers):
            router.forward = _Wrapped(self, layer, router)  # type: ignore[method-assign,assignment]

    def replay(self, experts: Tensor | None) -> None:
        """From here on passes choose these, also where a backward pass computes one again.

        Args:
            experts: (tokens, layers, top_k), in the order of the tokens of the passes; None lets the routers choose.
        """
        self._recorded = None if experts is None else experts.long()

    @contextlib.contextmanager
    def in_passes(self) -> Iterator[None]:
        """Around the passes of a call: what they replay ends with them, since a model may be borrowed in between."""
        self.differing.clear()
        try:
            yield
        finally:
            self._recorded = None

    @property
    def facts(self) -> list[tuple[int, int]]:
        """Of each router: how many experts there are, and how many a token gets."""
        routers: list[Any] = self.routers
        return [(int(router.num_experts), int(router.top_k)) for router in routers]

    def choose(self, layer: int, router: nn.Module, forward: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """One call of a router."""
        if self._recorded is None:
            return forward(*inputs)
        recorded = self._recorded[:, layer]
        number = inputs[0].numel() // inputs[0].shape[-1]
        if len(recorded) != number:
            message = f"a router was called with {number} tokens, and experts of {len(recorded)} are to be replayed"
            raise EngineError(message, fix="Does something compute the layers' tokens in pieces (tiled_mlp)?")
        kind = type(router)
        if kind not in self._place:
            self._place[kind] = self._find(router, forward, inputs)
        with _TopK(self._place[kind], recorded) as calls:
            out = forward(*inputs)
        assert calls.routed is not None, "the same router makes the same calls"
        if router.training:
            self.differing.add(recorded, calls.routed)
        return out

    @torch.no_grad()
    def _find(self, router: nn.Module, forward: Callable[..., Any], inputs: Sequence[Any]) -> int:
        """Which of a router's top-k calls gives its experts, seen in one call."""
        with _TopK() as calls:
            experts = routed_experts(router, forward(*inputs))
        places = [number for number, indices in enumerate(calls.indices) if indices is experts]
        if len(places) != 1:
            message = f"{type(router).__name__} does not take its experts from one top-k call, so none can be replayed"
            raise EngineError(message, fix="Leave router replay off for this family.")
        return places[0]


class _Wrapped:
    """The forward pass of a router, which asks `RouterReplay` whether the choice is made already."""

    def __init__(self, replay: RouterReplay, layer: int, router: nn.Module):
        self.replay, self.layer, self.router, self.inner = replay, layer, router, router.forward

    @torch.compiler.disable  # what is replayed changes with every pass: compiled layers end in front of it
    def __call__(self, *inputs: Any) -> Any:
        return self.replay.choose(self.layer, self.router, self.inner, inputs)


class _TopK(TorchFunctionMode):
    """Notes the top-k calls within the block, and answers one of them.

    Args:
        place: number of that call; None answers none.
        experts: (tokens, top_k) its indices; it keeps its own where they are `NO_RECORD`.

    Attributes:
        indices: of each call, as it was answered.
        routed: the indices that the answered call had itself.
    """

    def __init__(self, place: int | None = None, experts: Tensor | None = None):
        super().__init__()
        self.place, self.experts = place, experts
        self.indices: list[Tensor] = []
        self.routed: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOP_K:
            return out
        if len(self.indices) == self.place and self.experts is not None:
            scores, self.routed = (args[0] if args else (kwargs or {})["input"]), out[1]
            experts = torch.where(self.experts == NO_RECORD, out[1], self.experts)
            out = torch.return_types.topk((scores.gather(-1, experts), experts))  # type: ignore[attr-defined]
        self.indices.append(out[1])
        return out


def routed_experts(router: nn.Module, out: Tensor | Sequence[Tensor]) -> Tensor:
    """(tokens, top_k) the experts in what a router returned.

    Raises:
        EngineError: it returned something else than (logits, weights, experts).
    """
    experts = out[2] if isinstance(out, tuple) and len(out) == 3 else None
    if not isinstance(experts, Tensor) or experts.dim() != 2 or experts.is_floating_point():
        message = f"{type(router).__name__} does not return the experts of each token"
        raise EngineError(message, fix="Leave router replay off for this family.")
    return experts


def expert_balance(routing: Tensor, num_experts: int | None) -> dict[str, float]:
    """How evenly experts are chosen. A layer's load is its busiest expert's share over the mean share.

    - ``max_share``: the largest share of one expert in the choices of a layer;
    - ``max_load``: the load of the worst layer;
    - ``max_violation``: the load less one, mean over layers; 0 if all experts get as much (MaxVio; Wang et al. 2024,
      arXiv 2408.15664, section 4.1);
    - ``entropy``: of a layer's shares, in nats, mean over layers;
    - ``dead_experts``: how many experts, of all layers together, no token chose.

    Args:
        routing: (B, T, layers, top_k), `NO_RECORD` where a token has none.
        num_experts: of a layer; None leaves out what needs it.

    Returns:
        Nothing where no token has a record.
    """
    routing = routing[routing[..., 0, 0] != NO_RECORD].long()
    if not len(routing):
        return {}
    layers = routing.shape[1]
    experts = num_experts or int(routing.max()) + 1
    counts = torch.stack([torch.bincount(routing[:, layer].flatten(), minlength=experts) for layer in range(layers)])
    shares = counts.double() / counts.sum(-1, keepdim=True)
    metrics = {"max_share": float(shares.max()), "entropy": float(torch.special.entr(shares).sum(-1).mean())}
    if num_experts is None:
        return metrics
    loads = shares.amax(-1) * experts
    metrics |= {"max_load": float(loads.max()), "max_violation": float(loads.mean()) - 1}
    return {**metrics, "dead_experts": float((counts == 0).sum())}

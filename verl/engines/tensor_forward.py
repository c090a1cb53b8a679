"""A forward pass with a vocabulary sharded over ranks: each computes its part of the logits, and no rank ever has all.

Of its part of a token's logits a rank keeps four numbers (log-sum-exp, the label's logit, entropy, sum of squared
probabilities); those of all ranks give what is wanted, and gradients flow back through them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl import device as devices
from verl.algorithms.logprob import sum_pi_squared_from_logits
from verl.distributed import Ranks
from verl.distributed.axis_sharding import AxisSharding
from verl.distributed.tensor_parallel import joined_statistics
from verl.engines.forward import TokenForward
from verl.engines.rows import MicroBatch
from verl.errors import EngineError
from verl.models.fused_head import FusedHead, Shape
from verl.models.weights import named_tensors

NOWHERE = -1
PROBE_TOKENS = 6
TOLERANCE = 1e-4


class TensorForward(TokenForward):
    """As `TokenForward`, with a head of which each of ``peers`` may have its part of the rows."""

    def __init__(
        self, peers: Ranks, cuts: Mapping[str, AxisSharding], model: Any, kind: str, *args: Any, **kwargs: Any
    ):
        self.peers = peers
        head = model.get_output_embeddings() if kind == "causal_lm" else None
        names = {id(tensor): name for name, tensor in named_tensors(model).items()}
        self.words = cuts.get(names[id(head.weight)]) if head is not None else None
        super().__init__(model, kind, *args, **kwargs)

    @property
    def logits_per_token(self) -> int:
        whole = super().logits_per_token
        return whole if self.words is None else -(-whole // self.peers.size)

    def _statistics(self, logits: Tensor, labels: Tensor, outputs: Sequence[str]) -> dict[str, Tensor]:
        if self.words is None:
            return super()._statistics(logits, labels, outputs)
        here, inside = own_labels(labels, self.words)
        chosen = logits.gather(1, here[:, None])[:, 0].masked_fill(~inside, 0.0)
        entropy = self._entropy(logits) if "entropy" in outputs else None
        squared = sum_pi_squared_from_logits(logits) if "sum_pi_squared" in outputs else None
        statistics = joined_statistics(torch.logsumexp(logits, -1), chosen, entropy, squared, self.peers)
        return {name: x for name, x in zip(("log_probs", "entropy", "sum_pi_squared"), statistics) if x is not None}

    def _fused_head(self, backend: str | None) -> FusedHead | None:
        if backend is None or self.words is None:
            return super()._fused_head(backend)
        whole = FusedHead.of(self.model, backend)
        fused = VocabParallelHead(whole.function, whole.shape, self.words, self.peers)
        self._check_fused(fused)
        return fused

    @torch.no_grad()
    def _check_fused(self, fused: FusedHead) -> None:
        """Try out on a few tokens whether it gives this model's own log-probs, as `fusable` does. Collective."""
        size = self.model.config.get_text_config().vocab_size
        ids = torch.randint(0, size, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0)).to(self.device)
        everywhere = torch.arange(PROBE_TOKENS, device=self.device)
        micro = MicroBatch(everywhere, ids[None], everywhere[None], everywhere, ids, everywhere, PROBE_TOKENS, None)
        trains = self.model.training
        self.model.eval()
        try:
            own = self._statistics(self._logits(micro).float(), ids, ("log_probs",))["log_probs"]
            with (
                devices.autocast(self.device, self.dtype),
                fused.instead_of(self.head, everywhere, ids, 1.0, ("log_probs",)) as computed,
            ):
                self._run(micro)
        finally:
            self.model.train(trains)
        error = float((computed["log_probs"] - own).abs().max() / own.abs().max().clamp(min=1.0))
        if error > (TOLERANCE if self.dtype == torch.float32 and self.model.dtype == torch.float32 else 0.05):
            raise EngineError(
                f"the fused LM head does not give the log-probs of {type(self.model).__name__}'s own head",
                key="use_fused_kernels",
                fix="Set it to false.",
            )


@dataclass(frozen=True)
class VocabParallelHead(FusedHead):
    """The fused head over this rank's part of the vocabulary.

    Args:
        words: which part.
        peers: the ranks that have the others.
    """

    words: AxisSharding
    peers: Ranks

    def statistics(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shape: Shape,
        wanted: tuple[bool, bool],
    ) -> tuple[Tensor | None, ...]:
        nowhere = torch.full_like(labels, NOWHERE)  # a label that is in no tile leaves minus the log-sum-exp
        minus_lse, entropy, squared = self.function.apply(hidden, weight, bias, nowhere, shape, wanted)
        here, inside = own_labels(labels, self.words)
        chosen = _logit(hidden, weight, bias, here, shape).masked_fill(~inside, 0.0)
        return joined_statistics(
            -minus_lse, chosen, entropy if wanted[0] else None, squared if wanted[1] else None, self.peers
        )


def own_labels(labels: Tensor, words: AxisSharding) -> tuple[Tensor, Tensor]:
    """(N,) labels -> (N,) their places in this rank's part, 0 where they are elsewhere; (N,) whether they are here."""
    start, end = words.bounds
    inside = (labels >= start) & (labels < end)
    return (labels - start).masked_fill(~inside, 0), inside


def _logit(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shape: Shape) -> Tensor:
    """(N,) float32: one logit per token, rounded as those of the tiles are."""
    rows = weight.index_select(0, labels).to(hidden.dtype)
    z = (hidden.float() * rows.float()).sum(-1).to(hidden.dtype).float()
    if bias is not None:
        z = z + bias.index_select(0, labels)
    if shape.softcap is not None:
        return torch.tanh(z * (shape.scale / shape.softcap)) * (shape.softcap / shape.temperature)
    return z * shape.factor

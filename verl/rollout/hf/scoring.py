"""Log-probs of given tokens from plain forward passes over the sampler's model: no cache, nothing is drawn.

Consumes: requests. Waits for: nothing; a pass runs in the event loop's thread, and between two of them the loop gets
its turn. Whichever request gets its turn first computes the next pass for all that wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from verl.algorithms.logprob import logprobs_from_logits, top_k_from_logits
from verl.errors import RolloutError
from verl.models.head import output_head, select_positions
from verl.rollout.hf.runner import BorrowedModel
from verl.rollout.scores import ScoreRequest, Scores, check_score


@dataclass(eq=False)
class WaitingScore:
    """A request, and its answer or what is wrong with it."""

    request: ScoreRequest
    outcome: Scores | RolloutError | None = None


class TokenScorer:
    """Scores rows of text with a causal language model, whichever cache or kernels its sampler uses.

    Args:
        max_tokens: of one pass, padding included.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int, max_model_len: int, max_tokens: int):
        self.model, self.vocab_size, self.max_model_len, self.max_tokens = model, vocab_size, max_model_len, max_tokens
        self._borrowed, self._waiting = BorrowedModel(model, None), list[WaitingScore]()

    async def score(self, request: ScoreRequest) -> Scores:
        """The answer to one request; those that wait share passes.

        Raises:
            RolloutError: it cannot be scored, or the logits are not finite.
        """
        check_score(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        mine = WaitingScore(request)
        self._waiting.append(mine)
        try:
            await asyncio.sleep(0)  # requests of one turn of the loop join
            while mine.outcome is None:
                self._compute(self._next())
                await asyncio.sleep(0)
        finally:
            self._waiting = [other for other in self._waiting if other is not mine]
        if isinstance(mine.outcome, RolloutError):
            raise mine.outcome
        return mine.outcome

    def _next(self) -> list[WaitingScore]:
        """As many of the rows, in order of arrival, as fit into one pass; at least one."""
        rows = [row for row in self._waiting if row.outcome is None]
        longest = 0
        for count, row in enumerate(rows):
            longest = max(longest, len(row.request.token_ids))
            if count and longest * (count + 1) > self.max_tokens:
                return rows[:count]
        return rows

    def _compute(self, rows: Sequence[WaitingScore]) -> None:
        """Padding is behind the tokens, where no token of a causal model looks, and needs no mask."""
        requests = [row.request for row in rows]
        longest = max(len(request.token_ids) for request in requests)
        ids = torch.tensor([[*request.token_ids, *[0] * (longest - len(request.token_ids))] for request in requests])
        places = [torch.arange(r.start - 1, len(r.token_ids) - 1) + n * longest for n, r in enumerate(requests)]
        device, head = self.model.device, output_head(self.model, "causal_lm")
        with self._borrowed.ready(), select_positions(head, torch.cat(places).to(device)):
            logits = self.model(input_ids=ids.to(device), use_cache=False).logits[0]
            for row, part in zip(rows, logits.split([len(request.scored) for request in requests])):
                row.outcome = _outcome(row.request, part.float() / row.request.temperature)


def _outcome(request: ScoreRequest, logits: torch.Tensor) -> Scores | RolloutError:
    """From (T, V) logits that predict the scored tokens."""
    log_probs = logprobs_from_logits(logits, torch.tensor(request.scored, device=logits.device))
    if not bool(torch.isfinite(log_probs).all()):
        return RolloutError(f"the model's logits are not finite ({request.id})", fix="Are the weights of its folder?")
    if not request.top_k:
        return Scores(request.scored, log_probs.cpu().numpy())
    listed, ids = top_k_from_logits(logits, request.top_k)
    return Scores(request.scored, log_probs.cpu().numpy(), ids.cpu().numpy(), listed.cpu().numpy())

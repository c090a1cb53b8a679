"""What samplers over a foreign engine share: checks, versions, and the gate between requests and new weights.

Consumes: requests from `generate`, weights from `update_weights`. Waits for: a request waits while the gate is shut, an
update until the last request inside has ended. Unblocked by: the end of the update, the end of the last request.
An engine only defines how one request is sampled and aborted, and how weights are loaded.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl.errors import NotBuiltError, RolloutError
from verl.rollout.base import FINISH_REASONS, Completion, Request, Sampler, check_request
from verl.rollout.readiness import Gate, Readiness, check_level
from verl.rollout.resume import continued, join_attempts
from verl.rollout.uniforms import stream_key
from verl.weight_sync import WeightChunk

UNLIMITED = 1 << 30
"""Stands for a vocabulary or a context of unknown size."""
NEVER = -100.0
"""The bias of a token that is not drawn; vLLM takes no smaller one. Where a model draws the placeholder of an image,
later turns would have more of them than images."""


@dataclass(frozen=True)
class Sampled:
    """What an engine made of a request, before it is checked.

    Args:
        log_probs: one per token; None if the engine reports none.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] | None
    finish_reason: str
    routed_experts: Any = None
    num_preempted: int = 0


class GatedSampler(Sampler):
    """A sampler that hands requests to an engine.

    Args:
        vocab_size, max_model_len: of the model; token ids and lengths beyond them are refused here.
        seed: added to every request's own seed.
        name: of the engine, for messages.
    """

    takes_images = takes_videos = False

    def __init__(self, *, vocab_size: int, max_model_len: int, seed: int = 0, name: str = ""):
        self.vocab_size, self.max_model_len, self.seed, self.name = vocab_size, max_model_len, seed, name
        self._gate = Gate()
        self._state = Readiness()
        self._in_flight: set[str] = set()
        self._inside: set[str] = set()
        self._interrupted: set[str] = set()
        """Of those inside: which an update aborts."""
        self._spared: set[str] = set()
        """The last update got nothing of them, so the next one waits for their end."""
        self._given_up: set[str] = set()
        self._counts: dict[str, float] = {"requests": 0, "response_tokens": 0, "weight_updates": 0, "steps": 0}

    @property
    def version(self) -> int:
        return self._state.version

    async def generate(self, request: Request) -> Completion:
        if request.sees and not (self.takes_videos if request.videos else self.takes_images):
            takes = "no videos" if self.takes_images else "text only"
            fix = "Set actor_rollout_ref.rollout.name to vllm or hf." if request.videos else ""
            raise NotBuiltError(f"the sampler {self.name} takes {takes}", key=f"request {request.id}", fix=fix)
        check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        if request.id in self._in_flight:
            raise RolloutError("a request with this id is in flight", key="id", got=request.id)
        self._in_flight.add(request.id)
        parts: list[Completion] = []
        try:
            while not parts or (parts[-1].is_interrupted and self.at_update == "pause"):
                if parts:
                    request = continued(request, parts[-1])
                parts.append(await self._attempt(request))
        finally:
            for ids in (self._in_flight, self._interrupted, self._given_up):
                ids.discard(request.id)
            if not (parts and parts[-1].is_interrupted):
                self._spared.discard(request.id)
        self._counts["requests"] += not parts[-1].is_interrupted
        return join_attempts(parts)

    async def _attempt(self, request: Request) -> Completion:
        """What is sampled until the end, or until new weights interrupt it."""
        async with self._gate.inside():
            if request.id in self._given_up:  # it was aborted at the gate
                return Completion(request.id, (), (), "abort", ())
            self._state.check()
            version = self._state.version
            self._inside.add(request.id)
            try:
                sampled = self._checked(request, await self._sample(request))
            finally:
                self._inside.discard(request.id)
        spent = len(request.generated_prefix) + len(sampled.token_ids) >= request.sampling.max_tokens
        if sampled.finish_reason == "abort" and spent:
            sampled = replace(sampled, finish_reason="length")  # the abort came too late
        interrupted = sampled.finish_reason == "abort" and request.id in self._interrupted - self._given_up
        self._interrupted.discard(request.id)
        if interrupted and not sampled.token_ids:
            self._spared.add(request.id)
        else:
            self._spared.discard(request.id)
        self._counts["response_tokens"] += len(sampled.token_ids)
        return Completion(
            request.id,
            sampled.token_ids,
            sampled.log_probs or (),
            sampled.finish_reason,  # type: ignore[arg-type]  # checked above
            (version,) * len(sampled.token_ids),
            sampled.routed_experts,
            sampled.num_preempted,
            interrupted,
        )

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        async with self._gate.shut(None if self.at_update == "wait" else self._interrupt):
            with self._state.updating(version):
                await self._load(chunks, version)
            self._counts["weight_updates"] += 1

    async def _interrupt(self) -> None:
        """Abort what is inside, but what the last update already took every token from."""
        self._interrupted |= self._inside - self._spared
        await self._abort_begun(self._interrupted)

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        aborted = self._in_flight if request_ids is None else self._in_flight.intersection(request_ids)
        at_gate = aborted - self._inside
        self._given_up |= aborted
        return len(at_gate) + await self._abort(aborted & self._inside)

    async def sleep(self, level: int = 1) -> None:
        check_level(level)
        async with self._gate.shut():
            await self._sleep_engine(level)
            self._state.enter_sleep(level)

    async def wake(self) -> None:
        if self._state.is_asleep:
            await self._wake_engine()
            self._state.is_asleep = False

    def stats(self) -> dict[str, float]:
        return {"forward_tokens": self._counts["response_tokens"], **self._counts}

    @abstractmethod
    async def _sample(self, request: Request) -> Sampled:
        """Sample one request that was checked; its cancellation must free what it holds."""

    @abstractmethod
    async def _abort(self, request_ids: Collection[str]) -> int:
        """End these of the requests that are being sampled, with what they have; returns how many there were."""

    async def _abort_begun(self, request_ids: Collection[str]) -> None:
        """As `_abort`; an engine that knows when a request gets its first token waits for that."""
        await self._abort(request_ids)

    @abstractmethod
    async def _load(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Take all weights while nothing is sampled; raise if not all of them arrived."""

    @abstractmethod
    async def _sleep_engine(self, level: int) -> None:
        """Free the cache, at level 2 the weights too."""

    @abstractmethod
    async def _wake_engine(self) -> None:
        """Undo it."""

    def _checked(self, request: Request, sampled: Sampled) -> Sampled:
        wrong = invalid_reason(request, sampled, self.vocab_size)
        if wrong:
            raise RolloutError(f"{self.name} answered request {request.id!r} with nonsense: {wrong}")
        return sampled


def among_all(log_prob: float, excluded: Sequence[float], temperature: float) -> float:
    """A log-prob in the distribution with the tokens that are never drawn, which the trainer computes.

    An engine normalises after it adds `NEVER` to the logits of those tokens x. With p' for its probabilities and T for
    the temperature, p = p' / (1 + sum over x of p'(x) exp(-NEVER / T)); the sum is taken in logarithms, since either
    factor alone may overflow.

    Args:
        log_prob: log p' of the drawn token (nats).
        excluded: log p' of each x as the engine reports it.
        temperature: of the distribution, 1 for a greedy request.
    """
    if not excluded:
        return log_prob
    shares = [one - NEVER / temperature for one in excluded]
    return log_prob - float(np.logaddexp.reduce([0.0, *shares]))


def collapsed(request: Request, image_token_id: int | None) -> list[int]:
    """The prompt and the response so far with one placeholder for each image, for engines that expand it themselves.

    Raises:
        RolloutError: the prompt has not as many runs of placeholders as there are images.
    """
    ids, response = request.token_ids, list(request.generated_prefix)
    if not request.sees:
        return [*ids, *response]
    one_each = [token for before, token in zip([None, *ids], ids) if token != image_token_id or token != before]
    places, count = sum(token == image_token_id for token in one_each), len(request.images or ())
    if places != count:
        raise RolloutError(f"the prompt has places for {places} images, and the request has {count}", key="images")
    return [*one_each, *response]


def invalid_reason(request: Request, sampled: Sampled, vocab_size: int) -> str:
    """Why an engine's answer cannot be the answer to this request; empty if it can."""
    ids, logs = sampled.token_ids, sampled.log_probs
    budget = request.sampling.max_tokens - len(request.generated_prefix)
    if sampled.finish_reason not in FINISH_REASONS:
        return f"finish reason {sampled.finish_reason!r}"
    if not ids and sampled.finish_reason != "abort":
        return "no tokens"
    if len(ids) > budget:
        return f"{len(ids)} tokens where max_tokens leaves room for {budget}"
    if any(not 0 <= token < vocab_size for token in ids):
        return f"a token id outside 0 to {vocab_size - 1}"
    if logs is None:
        return ""
    if len(logs) != len(ids):
        return f"{len(logs)} log-probs for {len(ids)} tokens"
    bad = [x for x in logs if not math.isfinite(x) or x > 1e-3]
    return f"a log-prob of {bad[0]}" if bad else ""


def request_seed(request: Request, seed: int) -> int:
    """A seed below 2**31 from the request's key and the length of its response so far.

    The same request gets the same numbers on every replica. A continued response draws from a separate stream:
    engines that seed a generator per request cannot continue in the middle of one.
    """
    uid = request.uid or request.id
    high, low = stream_key(seed + request.sampling.seed, f"{uid}+{len(request.generated_prefix)}", request.sample_index)
    return (high ^ low) & 0x7FFFFFFF

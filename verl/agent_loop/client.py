"""The sampler as one trajectory sees it: a request per turn, keyed so that results depend on nothing else."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any

from verl.errors import RolloutError, suggest
from verl.rollout.base import Completion, Request, Sampler, SamplingParams

PARAMETERS = tuple(f.name for f in fields(SamplingParams))


@dataclass
class SamplerClient:
    """Sends requests of one trajectory.

    Args:
        sampler: serves them.
        uid: the prompt's identity; ``sample_index`` tells its samples apart.
        seed: of the run's sampling.
        response_length: budget of a request that does not name its own.
        stop_token_ids: what ends a response; empty takes the model's own.
    """

    sampler: Sampler
    uid: str
    sample_index: int
    seed: int
    response_length: int
    stop_token_ids: tuple[int, ...] = ()
    num_requests: int = 0
    seconds: float = 0.0

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
    ) -> Completion:
        """Sample one continuation of ``prompt_ids``.

        Args:
            request_id: any name; requests of one trajectory may share it (servers route by it).
        """
        turn, self.num_requests = self.num_requests, self.num_requests + 1
        request = Request(
            id=f"{self.uid}-{self.sample_index}-{turn}",
            token_ids=tuple(prompt_ids),
            sampling=self._parameters(sampling_params),
            # The token position is the counter of a request's random numbers, so every turn needs a key of its own.
            uid=self.uid if turn == 0 else f"{self.uid}/{turn}",
            sample_index=self.sample_index,
            images=image_data,
            videos=video_data,
        )
        start = time.perf_counter()
        try:
            return await self.sampler.generate(request)
        finally:
            self.seconds += time.perf_counter() - start

    def _parameters(self, given: dict[str, Any]) -> SamplingParams:
        unknown = sorted(set(given) - set(PARAMETERS) - {"logprobs"})
        if unknown:
            raise RolloutError(
                "unknown sampling parameter", got=unknown[0], allowed=PARAMETERS, fix=suggest(unknown[0], PARAMETERS)
            )
        known = {name: given[name] for name in PARAMETERS if name in given}
        known.setdefault("max_tokens", self.response_length)
        known.setdefault("stop_token_ids", self.stop_token_ids)
        return SamplingParams(**{"seed": self.seed, **known})

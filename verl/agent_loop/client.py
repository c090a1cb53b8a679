"""The sampler as one trajectory sees it: a request per turn, keyed so that results depend on nothing else."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from verl import stacks
from verl.agent_loop.early_stop import Stop
from verl.agent_loop.seen import SeenImages
from verl.agent_loop.unfinished import from_plain_part, plain_part
from verl.errors import RolloutError, suggest
from verl.json_text import Json
from verl.observability.traces import traced
from verl.rollout.base import Completion, Request, Sampler, SamplingParams
from verl.rollout.resume import continued, join_attempts

PARAMETERS = tuple(f.name for f in fields(SamplingParams))
OTHER_NAMES = {"max_new_tokens": "max_tokens", "response_length": "max_tokens"}
NO_EFFECT = {"logprobs", "n"}
"""Log-probs always come along, and the n samples of a prompt are n rows."""


def within_response(parameters: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The parameters of a further turn, to whose shortest response ``length`` tokens count already."""
    return {**parameters, "min_tokens": max(0, int(parameters.get("min_tokens") or 0) - length)}


@dataclass
class SamplerClient:
    """Sends requests of one trajectory.

    Args:
        sampler: serves them.
        uid: the prompt's identity; ``sample_index`` tells its samples apart.
        seed: of the run's sampling.
        response_length: budget of a request that does not name its own.
        stop_token_ids: end a response, besides the model's own end tokens.
        stop: once it is set, requests come back aborted and empty.
        seen: the images and videos of this trajectory, which every request has; a loop may add to them.
        goes_on: a request that is aborted resumes at once: its loop cannot resume in a later batch.

    Attributes:
        left: number and tokens so far of the request that resumes in a later batch; None while there is none.
    """

    sampler: Sampler
    uid: str
    sample_index: int
    seed: int
    response_length: int
    stop_token_ids: tuple[int, ...] = ()
    stop: Stop = field(default_factory=Stop)
    goes_on: bool = False
    seen: SeenImages = field(default_factory=SeenImages)
    num_requests: int = 0
    seconds: float = 0.0
    left: tuple[int, Completion] | None = None
    part: Completion | None = None
    """What the next request has from an earlier batch."""

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Begin where an earlier batch left this trajectory: what `state` gave there."""
        self.num_requests, self.part = int(state["turn"]), from_plain_part(state["part"])

    def restart(self) -> None:
        """Begin with the first request after all."""
        self.num_requests, self.part = 0, None

    def state(self, of_loop: Json) -> dict[str, Any]:
        """The trajectory that was left, as plain data.

        Args:
            of_loop: what its loop keeps of it.
        """
        assert self.left is not None, "no request was left"
        turn, part = self.left
        return {"turn": turn, "part": plain_part(part), "loop": of_loop}

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        generated_prefix: Sequence[int] = (),
    ) -> Completion:
        """Sample one continuation of ``prompt_ids``.

        Args:
            request_id: any name; requests of one trajectory may share it (servers route by it).
            sampling_params: keys of `SamplingParams`; ``max_new_tokens`` is understood too.
            image_data, video_data: pictures and `VideoClip` mappings of ``prompt_ids``, each kind in order; None: all
                that the trajectory has seen.
            generated_prefix: see `Request`; to resume a response that was aborted.

        Raises:
            RolloutError: an unknown parameter, or whatever the sampler refuses.
        """
        images, videos, inputs = self.seen.of_request(image_data, video_data)
        turn, self.num_requests = self.num_requests, self.num_requests + 1
        request = Request(
            id=f"{self.uid}-{self.sample_index}-{turn}",
            token_ids=tuple(prompt_ids),
            sampling=self._parameters(sampling_params),
            # The token position is the counter of a request's random numbers, so every turn needs a key of its own.
            uid=self.uid if turn == 0 else f"{self.uid}/{turn}",
            sample_index=self.sample_index,
            images=images,
            videos=videos,
            multi_modal_inputs=inputs,
            generated_prefix=tuple(generated_prefix),
            session=f"{request_id}/{self.uid}-{self.sample_index}",
        )
        parts, self.part = ([] if self.part is None else [self.part]), None
        request = continued(request, parts[0]) if parts else request
        start = time.perf_counter()
        payload = {"prompt_ids": prompt_ids, "sampling_params": sampling_params, "request_id": request.id}
        with traced("generate", "llm", payload) as call:
            try:
                parts.append(self.stop.answer(request) if self.stop.is_set else await self.sampler.generate(request))
                while self.goes_on and parts[-1].finish_reason == "abort":
                    request = continued(request, parts[-1])
                    parts.append(await self.sampler.generate(request))
            finally:
                self.seconds += time.perf_counter() - start
            stacks.mark()
            done = join_attempts(parts)
            if call is not None:
                call.returns({"token_ids": done.token_ids, "finish_reason": done.finish_reason})
        if self.stop.keeps and done.finish_reason == "abort":
            self.left = turn, done
        return done

    def _parameters(self, parameters: Mapping[str, Any]) -> SamplingParams:
        parameters = {OTHER_NAMES.get(name, name): value for name, value in parameters.items()}
        unknown = sorted(set(parameters) - set(PARAMETERS) - NO_EFFECT)
        if unknown:
            raise RolloutError(
                "unknown sampling parameter", got=unknown[0], allowed=PARAMETERS, fix=suggest(unknown[0], PARAMETERS)
            )
        settings = {name: parameters[name] for name in PARAMETERS if parameters.get(name) is not None}
        settings.setdefault("max_tokens", self.response_length)
        # An answer that gets less than the shortest length has no room to be longer.
        settings["min_tokens"] = min(settings.get("min_tokens") or 0, settings["max_tokens"])
        settings["stop_token_ids"] = tuple(sorted({*self.stop_token_ids, *(settings.get("stop_token_ids") or ())}))
        return SamplingParams(**{"seed": self.seed, **settings})

"""Servers with OpenAI's completions: vLLM's, which takes and gives token ids, and all others, which take text.

vLLM's fields beyond OpenAI's: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html; its calls for
weights, abort and sleep exist where it runs with ``VLLM_SERVER_DEV_MODE=1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import RolloutError
from verl.json_text import JsonObject
from verl.rollout.base import Request
from verl.rollout.gated import Sampled, collapsed
from verl.rollout.lost import EngineLostError
from verl.rollout.scores import ScoreRequest, Scores
from verl.rollout.server.dialect import (
    Dialect,
    budget_of,
    check_prompt,
    log_probs,
    resumed_prompt,
    shortest_of,
    token_ids,
)
from verl.rollout.server.pictures import Post

PATH, GENERATE = "/v1/completions", "/inference/v1/generate"
DEV_MODE = "Start it with VLLM_SERVER_DEV_MODE=1 in its environment."
EXTENSION = "verl.rollout.vllm.extension.WeightReceiver"
IMAGES = (
    "Start vLLM 0.32 or newer with --enable-scale-out, and with data.mm_processor_kwargs as its --mm-processor-kwargs; "
    "or set actor_rollout_ref.rollout.name to vllm or hf."
)
_TOKEN = "token_id:"


class VLLMDialect(Dialect):
    """vLLM's own server, 0.8.5 and newer."""

    name = "vllm"
    takes_images = True
    updates_from_folder = scores_tokens = True
    fix_of_reload = f"Start it with --worker-extension-cls {EXTENSION}, or set actor_rollout_ref.rollout.name=hf."
    _has_extension: bool | None = None

    def question(self, request: Request, stops: Sequence[int], seed: int) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling
        parameters = {
            "max_tokens": budget_of(request),
            "min_tokens": shortest_of(request),
            "repetition_penalty": sampling.repetition_penalty,
            "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "seed": seed,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if sampling.ignore_eos else list(stops),
            "logprobs": 1,
            "skip_special_tokens": False,
            **self.bias,
        }
        payload = {
            "model": self.model,
            "return_token_ids": True,
            "request_id": request.id,
            **({"priority": request.priority} if request.priority else {}),
        }
        if request.sees:
            prompt = collapsed(request, self.image_token_id)
            return GENERATE, {**payload, "token_ids": prompt, "sampling_params": parameters}
        return PATH, {
            **payload,
            **parameters,
            "prompt": resumed_prompt(request),
            "return_tokens_as_token_ids": True,  # says the same in older versions
            "add_special_tokens": False,
        }

    def score_question(self, request: ScoreRequest) -> tuple[str, JsonObject]:
        # vLLM samples at least one token. A fixed request keeps the default parameters of the model's folder away.
        return PATH, {"model": self.model, "prompt": list(request.token_ids), "add_special_tokens": False,
                      "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": request.top_k}  # fmt: skip

    def scores(self, request: ScoreRequest, content: JsonObject) -> Scores:
        (choice,) = content["choices"]
        entries = choice.get("prompt_logprobs")
        if not entries:
            raise ValueError("it has no prompt_logprobs")
        if len(entries) != len(request.token_ids):
            raise ValueError(f"prompt_logprobs of {len(entries)} tokens, where {len(request.token_ids)} were sent")
        positions = [{int(token): one for token, one in entry.items()} for entry in entries[request.start :]]
        for place, (token, listed) in enumerate(zip(request.scored, positions)):
            if token not in listed:
                raise ValueError(f"response token {place} is {token}, of which it gives no log-prob")
        log_probs = [listed[token]["logprob"] for token, listed in zip(request.scored, positions)]
        if not request.top_k:
            return Scores.of(request.scored, log_probs, None)
        top = [_most_likely(listed, token, request.top_k) for token, listed in zip(request.scored, positions)]
        return Scores.of(request.scored, log_probs, top)

    async def exchange(self, request: Request, payload: dict[str, Any], post: Post) -> JsonObject:
        if request.sees:
            urls = await self.image_urls(request)
            payload = {**payload, "content_parts": [{"type": "image_url", "url": url} for url in urls]}
        try:
            return await post(payload)
        except RolloutError as error:
            if request.sees and ("(404)" in error.message or "(403)" in error.message):
                raise RolloutError(f"{error.message}. No other call takes images with token ids", fix=IMAGES) from error
            raise

    def answer(self, request: Request, content: JsonObject) -> Sampled:
        (choice,) = content["choices"]
        logs = choice["logprobs"]
        if request.sees:
            check_prompt(request, content.get("prompt_token_ids"), IMAGES)
            return Sampled(
                token_ids(choice["token_ids"]),
                log_probs(entry["logprob"] for entry in logs["content"]),
                str(choice["finish_reason"]),
            )
        ids = choice.get("token_ids")
        if ids is None:
            ids = [int(token.removeprefix(_TOKEN)) for token in logs["tokens"]]
        return Sampled(token_ids(ids), log_probs(logs["token_logprobs"]), str(choice["finish_reason"]))

    def key(self, request: Request) -> str:
        return f"generate-tokens-{request.id}" if request.sees else f"cmpl-{request.id}-0"

    async def abort(self, keys: Sequence[str]) -> bool:
        return await self._dev("/abort_requests", {"request_ids": list(keys)})

    async def update(self, folder: str, version: int) -> None:
        call: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        if await self._extended():
            call = {"method": "verl_load_folder", "args": [folder]}
        if not await self._dev("/collective_rpc", call):
            raise RolloutError("this vLLM server has no call for new weights", key=f"version {version}", fix=DEV_MODE)
        await self._forget()

    async def _extended(self) -> bool:
        """Whether this library's class is in the server's workers: it completes the reload."""
        if self._has_extension is None:
            try:
                self._has_extension = await self._dev("/collective_rpc", {"method": "verl_ready"})
            except EngineLostError:  # an unknown method is an error of the server
                self._has_extension = False
        return self._has_extension

    async def reload(self) -> bool:
        method = "verl_reload_last" if await self._extended() else "reload_weights"
        done = await self._dev("/collective_rpc", {"method": method})
        if done:
            await self._forget()
        return done

    async def _forget(self) -> None:
        """Nothing that other weights computed is used again: neither prefixes nor features of images."""
        await self.ask("POST", "/reset_prefix_cache")
        if self.image_token_id is not None and not await self._dev("/reset_encoder_cache", {}):
            raise RolloutError("this vLLM server keeps features of images under old weights", fix=IMAGES)

    async def prompt_log_probs(self, token_ids: Sequence[int]) -> list[float] | None:
        request = ScoreRequest("probe", tuple(token_ids), 1)
        path, payload = self.score_question(request)
        content = await self.ask("POST", path, payload)
        has_any = content["choices"][0].get("prompt_logprobs")
        return [float(value) for value in self.scores(request, content).log_probs] if has_any else None

    async def sleep(self, level: int) -> bool:
        return await self._dev(f"/sleep?level={level}", {})

    async def wake(self) -> bool:
        return await self._dev("/wake_up", {})

    async def _dev(self, path: str, payload: dict[str, Any]) -> bool:
        """A call that exists in development mode only."""
        try:
            await self.ask("POST", path, payload)
        except RolloutError as error:
            if "(404)" in error.message or "(405)" in error.message:
                return False
            raise
        return True


def _most_likely(listed: Mapping[int, JsonObject], sent: int, top_k: int) -> list[tuple[int, object]]:
    """At most ``top_k`` tokens and their log-probs.

    The token that was sent is listed in any case, with its rank. With the log-prob of the last one of the others it has
    that one's rank: it is left out then.
    """
    ranked = sorted(listed, key=lambda token: (int(listed[token]["rank"]), token == sent))
    return [(token, listed[token]["logprob"]) for token in ranked[:top_k] if int(listed[token]["rank"]) <= top_k]


class OpenAIDialect(Dialect):
    """Any other server with OpenAI's completions: text in, text out, no log-probs of token ids; for evaluation."""

    name = "openai"
    takes_ids = False
    gives_log_probs = False

    def question(self, request: Request, stops: Sequence[int], seed: int) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling
        if sampling.top_k > 0 or sampling.ignore_eos or not sampling.is_unadjusted:
            raise RolloutError(
                "OpenAI's completions know neither top_k nor ignore_eos, no repetition penalty, no shortest response",
                key="actor_rollout_ref.rollout.server.api",
                got=self.name,
                fix="Set top_k=-1, ignore_eos=false, repetition_penalty=1 and data.min_response_length=0, or name the "
                "kind of the server: actor_rollout_ref.rollout.server.api=vllm.",
            )
        return PATH, {
            "model": self.model,
            "prompt": self.text().decode(resumed_prompt(request), skip_special_tokens=False),
            "max_tokens": budget_of(request),
            "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
        }

    def answer(self, request: Request, content: JsonObject) -> Sampled:
        (choice,) = content["choices"]
        text, why = choice["text"], str(choice["finish_reason"])
        ids = tuple(self.text().encode(text, add_special_tokens=False))[: budget_of(request)]
        if not ids and why == "stop":  # it ended at once, and the end token is not part of the text
            raise ValueError("an empty text")
        return Sampled(ids, None, why)

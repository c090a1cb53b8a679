"""SGLang's native interface: token ids and log-probs, weights from disk, abort with what there is.

Requests follow the documented fields of ``GenerateReqInput`` and its siblings
(https://docs.sglang.ai/basic_usage/native_api.html and .../sampling_params.html). No SGLang server was run with this:
its kernels cannot be installed on the test machines, where a server that follows the documentation replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.errors import RolloutError
from verl.json_text import Json, JsonObject
from verl.rollout.base import Request
from verl.rollout.gated import Sampled, collapsed
from verl.rollout.scores import ScoreRequest, Scores
from verl.rollout.server.dialect import Dialect, budget_of, check_prompt, log_probs, shortest_of, token_ids
from verl.rollout.server.pictures import Post

IMAGES = (
    "Use SGLang 0.5.23 or newer, without SGLANG_MM_AVOID_RETOKENIZE=0, with an image processor of the same limits as "
    "data.mm_processor_kwargs; or set actor_rollout_ref.rollout.name to vllm or hf."
)
"""With images it makes a text of the prompt and tokens of that, which older versions sample from."""


class SGLangDialect(Dialect):
    """An SGLang server."""

    name = "sglang"
    takes_images = True
    updates_from_folder = scores_tokens = True
    raw_is_adjusted = True

    def question(self, request: Request, stops: Sequence[int], seed: int) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling
        return "/generate", {
            "input_ids": collapsed(request, self.image_token_id),
            "rid": request.id,
            "return_logprob": True,
            "logprob_start_len": -1,  # of the response only
            "sampling_params": {
                "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k if sampling.top_k > 0 else -1,
                "repetition_penalty": sampling.repetition_penalty,
                "max_new_tokens": budget_of(request),
                "min_new_tokens": shortest_of(request),
                "stop_token_ids": [] if sampling.ignore_eos else list(stops),
                "ignore_eos": sampling.ignore_eos,
                "sampling_seed": seed,
                "skip_special_tokens": False,
                "no_stop_trim": True,
                **self.bias,
            },
        }

    def score_question(self, request: ScoreRequest) -> tuple[str, JsonObject]:
        return "/generate", {
            "input_ids": list(request.token_ids),
            "return_logprob": True,
            "logprob_start_len": request.start - 1,  # SGLang says null for the first token that it is queried for
            "top_logprobs_num": request.top_k,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
        }

    def scores(self, request: ScoreRequest, content: JsonObject) -> Scores:
        meta, count = (content[0] if isinstance(content, list) else content)["meta_info"], len(request.scored)
        triples = meta["input_token_logprobs"]  # (log-prob, token id, text or null)
        if len(triples) != count + 1:
            raise ValueError(f"input_token_logprobs of {len(triples)} tokens, where {count + 1} were queried")
        listed = None
        if request.top_k:
            listed = [[(t[1], t[0]) for t in position] for position in meta["input_top_logprobs"][1:]]
            if len(listed) != count:
                raise ValueError(f"input_top_logprobs of {len(listed)} tokens, where {count} were queried")
        return Scores.of(token_ids(t[1] for t in triples[1:]), [t[0] for t in triples[1:]], listed)

    async def exchange(self, request: Request, payload: dict[str, Any], post: Post) -> JsonObject:
        if request.sees:
            payload = {**payload, "image_data": await self.image_urls(request), "return_prompt_token_ids": True}
        return await post(payload)

    def answer(self, request: Request, content: JsonObject) -> Sampled:
        content = content[0] if isinstance(content, list) else content
        if request.sees:
            check_prompt(request, content.get("prompt_token_ids"), IMAGES)
        meta = content["meta_info"]
        why = meta["finish_reason"]
        why = why["type"] if isinstance(why, dict) else str(why)
        triples = meta["output_token_logprobs"]  # (log-prob, token id, text or null)
        return Sampled(token_ids(t[1] for t in triples), log_probs(t[0] for t in triples), why)

    async def abort(self, keys: Sequence[str]) -> bool:
        for key in keys:
            await self.ask("POST", "/abort_request", {"rid": key})
        return True

    async def update(self, folder: str, version: int) -> None:
        payload: dict[str, Json] = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
        answer = await self.ask("POST", "/update_weights_from_disk", payload)
        if not answer.get("success"):
            raise RolloutError(f"SGLang does not take the weights: {answer.get('message')}", key=f"version {version}")

    async def sleep(self, level: int) -> bool:
        tags = ["kv_cache"] if level == 1 else ["kv_cache", "weights"]
        await self.ask("POST", "/release_memory_occupation", {"tags": tags})
        return True

    async def wake(self) -> bool:
        await self.ask("POST", "/resume_memory_occupation", {})
        return True

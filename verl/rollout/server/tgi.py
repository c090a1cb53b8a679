"""Servers with the interface of Hugging Face's text-generation-inference: text in, token ids and log-probs out.

https://huggingface.github.io/text-generation-inference. The prompt passes a tokenizer on its way; the server sends back
the ids it made of it, and an answer to other ids than were meant is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.errors import RolloutError
from verl.json_text import JsonObject
from verl.rollout.base import Request
from verl.rollout.gated import Sampled
from verl.rollout.server.dialect import (
    Dialect,
    budget_of,
    check_prompt,
    log_probs,
    resumed_prompt,
    shortest_of,
    token_ids,
)

FINISH = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


class TGIDialect(Dialect):
    """A text-generation-inference server; for evaluation, since it takes no new weights."""

    name = "tgi"
    takes_ids = False

    def question(self, request: Request, stops: Sequence[int], seed: int) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling
        if sampling.ignore_eos:
            raise RolloutError(
                "text-generation-inference cannot go on after the end token",
                key="actor_rollout_ref.rollout.ignore_eos", got=True, fix="Set it to false.",
            )  # fmt: skip
        if shortest_of(request):
            raise RolloutError(
                "text-generation-inference has no shortest response",
                key="data.min_response_length", got=sampling.min_tokens, fix="Set it to 0.",
            )  # fmt: skip
        parameters = {
            "do_sample": not sampling.is_greedy,
            "temperature": None if sampling.is_greedy or sampling.temperature == 1 else sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p < 1 else None,
            "top_k": sampling.top_k if sampling.top_k > 0 else None,
            "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        }
        return "/generate", {
            "inputs": self.text().decode(resumed_prompt(request), skip_special_tokens=False),
            "parameters": {
                **{name: value for name, value in parameters.items() if value is not None},
                "max_new_tokens": budget_of(request),
                "seed": seed,
                "details": True,
                "decoder_input_details": True,
                "return_full_text": False,
            },
        }

    def answer(self, request: Request, content: JsonObject) -> Sampled:
        details = (content[0] if isinstance(content, list) else content)["details"]
        fix = "Serve the model with the tokenizer of actor_rollout_ref.model.path."
        check_prompt(request, [token["id"] for token in details["prefill"]], fix)
        tokens = details["tokens"]
        ids = token_ids(token["id"] for token in tokens)
        return Sampled(ids, log_probs(token["logprob"] for token in tokens), FINISH[details["finish_reason"]])

"""What vLLM and SGLang answer to a request for log-probs of a prompt, computed by a model in their documented forms."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def table_of(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """(tokens - 1, V) log-probs at temperature 1 of every token but the first."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)


def vllm_answer(model: PreTrainedModel, payload: dict[str, Any]) -> tuple[int, Any]:
    """``/v1/completions`` with ``prompt_logprobs``: null, then a mapping per token with its most likely tokens."""
    prompt, k = payload["prompt"], payload["prompt_logprobs"]
    entries: list[Any] = [None]
    for token, row in zip(prompt[1:], table_of(model, prompt)):
        order = row.argsort(descending=True).tolist()
        listed = {token: order.index(token) + 1} | {v: n + 1 for n, v in enumerate(order[:k])}
        entries.append(
            {str(v): {"logprob": row[v].item(), "rank": rank, "decoded_token": "x"} for v, rank in listed.items()}
        )
    choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "prompt_logprobs": entries}
    return 200, {"id": "cmpl-1", "object": "text_completion", "model": payload["model"], "choices": [choice]}


def sglang_answer(model: PreTrainedModel, payload: dict[str, Any]) -> tuple[int, Any]:
    """``/generate`` with ``return_logprob``: triples from ``logprob_start_len`` on, of which the first has null."""
    ids, start, k = payload["input_ids"], payload["logprob_start_len"], payload["top_logprobs_num"]
    rows = [None, *table_of(model, ids)][start + 1 :]
    triples = [[None, ids[start], None], *([row[v].item(), v, None] for v, row in zip(ids[start + 1 :], rows))]
    meta: dict[str, Any] = {"finish_reason": {"type": "length", "length": 0}, "input_token_logprobs": triples}
    if k:
        tops = [list(zip(*(x.tolist() for x in row.topk(k)))) for row in rows]
        meta["input_top_logprobs"] = [None, *([[value, v, None] for value, v in top] for top in tops)]
    return 200, {"text": "", "meta_info": meta}

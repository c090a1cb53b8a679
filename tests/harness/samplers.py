"""Tiny models, requests and the arithmetic that samplers are checked against."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl.rollout import Completion, Request, Sampler, SamplingParams

EOS = 5
Tasks = list["asyncio.Future[Completion]"]
FAMILIES = {
    "qwen2": {},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "llama": {"num_key_value_heads": 1},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0},
    "mistral": {"sliding_window": 7},
}


def tiny_model(family: str = "qwen2", vocab: int = 61, seed: int = 0, scale: float = 3.0, **config) -> PreTrainedModel:
    """A randomly initialised model of two layers; ``scale`` widens its weights, so that attention matters."""
    settings = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": vocab,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        **FAMILIES.get(family, {}),
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.split("-")[0], **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.eval()


def prompt(length: int, seed: int, vocab: int = 61) -> tuple[int, ...]:
    """Random tokens, the end token left out."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(EOS + 1, vocab, (length,), generator=generator).tolist())


def requests(prompts: Sequence[tuple[int, ...]], samples: int = 1, **sampling) -> list[Request]:
    """``samples`` requests per prompt; the sampling settings may be lists, one entry per request."""
    made = []
    for number, tokens in enumerate(prompts):
        for sample in range(samples):
            index = len(made)
            chosen = {k: v[index % len(v)] if isinstance(v, list) else v for k, v in sampling.items()}
            made.append(
                Request(f"{number}-{sample}", tokens, SamplingParams(**chosen), uid=f"row{number}", sample_index=sample)
            )
    return made


def sample(sampler: Sampler, wanted: Sequence[Request]) -> list[Completion]:
    """All requests at once, answers in the order of the requests."""

    async def run() -> list[Completion]:
        return list(await asyncio.gather(*(sampler.generate(request) for request in wanted)))

    return asyncio.run(run())


async def stopped_at_work(pid: int, ask: Callable[[], Tasks], owes: Callable[[Tasks], bool]) -> Tasks:
    """Stops a process that has worked on requests and owes answers, however quick or busy the machine is.

    Args:
        ask: sends the requests; called again if the process was done with them before it could be stopped.
        owes: whether an answer of the process is missing.

    Returns:
        The requests. The process is stopped, not ended.
    """
    process = psutil.Process(pid)
    while True:
        start, tasks = process.cpu_times().user, ask()
        while process.cpu_times().user - start < 0.1 and not all(task.done() for task in tasks):
            await asyncio.sleep(0.005)
        process.suspend()
        for _ in range(20):  # what it answered before arrives
            await asyncio.sleep(0.005)
        if owes(tasks):
            return tasks
        process.resume()
        await asyncio.gather(*tasks)


def reference_log_probs(model: PreTrainedModel, request: Request, completion: Completion) -> torch.Tensor:
    """(tokens, V) log-probs at the request's temperature from one plain forward pass over the whole sequence."""
    known = (*request.token_ids, *request.generated_prefix)
    ids = torch.tensor([[*known, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(known) - 1 : -1].float()
    return (adjusted(logits, request, completion) / (request.sampling.temperature or 1.0)).log_softmax(-1)


def adjusted(logits: torch.Tensor, request: Request, completion: Completion) -> torch.Tensor:
    """(tokens, V) logits after the shortest length and the repetition penalty, a token and an entry at a time."""
    sampling, known = request.sampling, [*request.token_ids, *request.generated_prefix]
    made = logits.clone()
    for place in range(len(completion.token_ids)):
        if len(request.generated_prefix) + place < sampling.min_tokens:
            made[place, [EOS, *sampling.stop_token_ids]] = float("-inf")
        for token in {*known, *completion.token_ids[:place]} if sampling.repetition_penalty != 1 else ():
            value = made[place, token].item()
            penalty = sampling.repetition_penalty
            made[place, token] = value / penalty if value > 0 else value * penalty
    return made


def largest_difference(model: PreTrainedModel, wanted: Sequence[Request], found: Sequence[Completion]) -> float:
    """Between reported and teacher-forced log-probs, over all tokens."""
    worst = 0.0
    for request, completion in zip(wanted, found):
        logs = reference_log_probs(model, request, completion)
        expected = logs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        worst = max(worst, (expected - torch.tensor(completion.log_probs)).abs().max().item())
    return worst


def renamed(request: Request, **changes) -> Request:
    return dataclasses.replace(request, **changes)

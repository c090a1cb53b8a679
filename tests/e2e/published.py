"""A published model of 135 million parameters on every engine: rows, what transformers computes for them, and cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.dist.engine_cells import plain, sharded
from tests.dist.titan_cells import titan
from tests.harness.engines import padded_logits
from tests.megatron.cells import megatron
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.distributed import Ranks
from verl.protocol import DataProto

SUMS = (("44 plus 34", "78"), ("17 plus 25", "The sum is 42."), ("60 plus 9", "It is 70"), ("81 plus 18", "99"))
ANSWERED_TWICE = [(question, text) for question, answer in SUMS for text in (answer, f"{answer}, I think")]
CLIP, OPTIM = 0.2, {"lr": 1e-5}


def answers(path: Path) -> DataProto:
    """Eight answers to four prompts of the chat template, with advantages and log-probs of an older policy.

    Prompts are padded on the left, responses on the right.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts, responses = [], []
    for question, answer in ANSWERED_TWICE:
        message = [{"role": "user", "content": f"What is {question}?"}]
        prompts.append(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
        responses.append(tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids)
    before, after = max(map(len, prompts)), max(map(len, responses))
    ids = torch.zeros(len(prompts), before + after, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        place = slice(before - len(prompt), before + len(response))
        ids[row, place], attention[row, place] = torch.tensor(prompt + response), 1
    mask = attention[:, before:]
    draw = torch.Generator().manual_seed(3)
    advantages = torch.randn(len(prompts), 1, generator=draw) * mask
    drift = 0.1 * torch.randn(mask.shape, generator=draw)
    batch = DataProto.from_dict(
        tensors={
            "prompts": ids[:, :before],
            "responses": ids[:, before:],
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask,
            "advantages": advantages,
        }
    )
    log_probs = expected(path, batch)["log_probs"]
    return batch.union(DataProto.from_dict(tensors={"old_log_probs": (log_probs + drift) * mask}))


def clipped_loss(log_probs: Tensor, batch: DataProto) -> Tensor:
    """The mean over all response tokens of max(-A r, -A clip(r, 1 - CLIP, 1 + CLIP)), r = exp(new - old)."""
    tensors = batch.batch
    mask, advantages = tensors["response_mask"], tensors["advantages"]
    ratio = (log_probs - tensors["old_log_probs"]).exp()
    per_token = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    return (per_token * mask).sum() / mask.sum()


def expected(path: Path, batch: DataProto) -> dict[str, Any]:
    """By transformers and formulas alone: log-probs, and with ``old_log_probs`` PPO's clipped loss and its gradient.

    ``slope`` is the mean of |A| r: no loss moves by more than this times the largest change of a log-prob.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tensors = batch.batch
    mask = tensors["response_mask"]
    log_probs = padded_logits(model, batch).log_softmax(-1).gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1)
    if "old_log_probs" not in tensors.keys():
        return {"log_probs": log_probs.detach() * mask}
    loss = clipped_loss(log_probs, batch)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    ratio = (log_probs.detach() - tensors["old_log_probs"]).exp()
    slope = (tensors["advantages"].abs() * ratio * mask).sum() / mask.sum()
    numbers = {"loss": loss.detach(), "slope": slope, "grad_norm": norm}
    return {"log_probs": log_probs.detach() * mask, **{name: float(value) for name, value in numbers.items()}}


BUILD: dict[str, Callable[[Path], Any]] = {
    "plain": lambda path: plain(path, optim=OPTIM),
    "fsdp2": lambda path: sharded(path, optim=OPTIM),
    "megatron": lambda path: megatron(path, optim=OPTIM, tensor_model_parallel_size=3),
    "torchtitan": lambda path: titan(path, optim=OPTIM, tensor_parallel_size=3),
}


@dataclass(frozen=True)
class FirstStep:
    """What an engine computes for `answers`: every rank returns the log-probs of its rows, the loss, the norm."""

    engine: str
    path: Path
    batch: dict[str, Tensor]

    @property
    def __name__(self) -> str:
        return self.engine

    def __call__(self, ranks: Ranks, folder: Path) -> dict[str, Any]:
        engine = BUILD[self.engine](self.path)
        batch = DataProto.from_dict(tensors=self.batch)
        mine = batch[list(range(ranks.rank, len(batch), ranks.size))]
        log_probs = engine.infer(mine, micro_batch_size=2)["log_probs"]
        metrics = engine.train_batch(mine, PPOPolicyLoss(ActorConfig(clip_ratio=CLIP)), micro_batch_size=2).values()
        again = engine.train_batch(mine, PPOPolicyLoss(ActorConfig(clip_ratio=CLIP)), micro_batch_size=2).values()
        return {
            "log_probs": log_probs.tolist(),
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            "next_loss": again["loss"],
        }

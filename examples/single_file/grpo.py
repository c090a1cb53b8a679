"""GRPO in one file: sample, score, compare within the group, take one clipped step. Nothing of verl is imported.

    python examples/single_file/grpo.py --model outputs/quickstart/sft/global_step_360/model/huggingface \
        --train outputs/quickstart/data/train.parquet --test outputs/quickstart/data/test.parquet

This is the algorithm that `python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo` runs, for one process and a
model that fits into it: read it top to bottom. A test holds its losses against the library's on the library's rollouts.
Shapes: B rows (prompts x samples), P prompt tokens (padded on the left), T response tokens (padded on the right).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase


@dataclass
class Settings:
    """Defaults are those of the quickstart."""

    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    mini_batch: int = 64  # prompts per optimizer step
    epochs: int = 1
    max_new_tokens: int = 8
    learning_rate: float = 2e-4
    warmup_steps: int = 10
    weight_decay: float = 0.01
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 3.0  # dual clip: bounds the loss of a bad token that became likely
    max_grad_norm: float = 1.0
    seed: int = 0


@dataclass
class Rollouts:
    """What one round of sampling leaves."""

    prompts: Tensor  # (B, P) int64
    responses: Tensor  # (B, T) int64
    prompt_mask: Tensor  # (B, P) 1 on real tokens
    mask: Tensor  # (B, T) 1 up to and including the end token
    groups: Tensor  # (B,) which prompt

    def rows(self, chosen: Tensor) -> Rollouts:
        return Rollouts(*(x[chosen] for x in vars(self).values()))


# ---- 1. Sampling ----


def encode(tokenizer: PreTrainedTokenizerBase, chats: Iterable[list[dict]]) -> tuple[Tensor, Tensor]:
    """Chat prompts -> ids and mask (B, P), padded on the left."""
    texts = [tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=True) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    return batch["input_ids"], batch["attention_mask"]


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor, prompt_mask: Tensor, new_tokens: int, end: int, pad: int, greedy: bool):
    """Continue every prompt until it ends or is `new_tokens` long; returns responses and their mask, (B, T)."""
    attention, cache, step = prompt_mask, None, prompts
    positions = (prompt_mask.cumsum(-1) - 1).clamp(min=0)
    alive = torch.ones(len(prompts), dtype=torch.bool)
    responses, mask = [], []
    for _ in range(new_tokens):
        out = model(step, attention_mask=attention, position_ids=positions, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        token = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
        token = torch.where(alive, token, pad)
        responses.append(token)
        mask.append(alive.long())
        alive = alive & (token != end)
        if not alive.any():
            break
        step, positions = token[:, None], positions[:, -1:] + 1
        attention = torch.cat([attention, torch.ones_like(step)], dim=1)
    return torch.stack(responses, 1), torch.stack(mask, 1)


# ---- 2. Rewards and advantages ----


def score(tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts, answers: list[str]) -> Tensor:
    """1 for exactly the expected answer, else 0; (B,)."""
    texts = tokenizer.batch_decode(rollouts.responses, skip_special_tokens=True)
    return torch.tensor([float(text.strip() == answer) for text, answer in zip(texts, answers)])


def group_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """(B,): each reward against those of the same prompt, in units of their sample standard deviation."""
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        members = groups == group
        if members.sum() > 1:
            own = rewards[members]
            advantages[members] = (own - own.mean()) / (own.std() + 1e-6)
    return advantages


# ---- 3. The loss ----


def response_log_probs(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """(B, T): the log-probability of every response token, 0 behind the end."""
    ids = torch.cat([rollouts.prompts, rollouts.responses], dim=1)
    attention = torch.cat([rollouts.prompt_mask, rollouts.mask], dim=1)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=attention, position_ids=positions).logits.float()
    predicting = logits[:, rollouts.prompts.shape[1] - 1 : -1]  # position t - 1 predicts token t
    found = predicting.log_softmax(-1).gather(-1, rollouts.responses[..., None])[..., 0]
    return torch.where(rollouts.mask.bool(), found, 0.0)


def policy_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, s: Settings) -> Tensor:
    """PPO's clipped loss, averaged over all tokens of the mini-batch."""
    ratio = (new - old).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    worst = torch.maximum(plain, clipped)
    bounded = torch.where(advantages < 0, torch.minimum(worst, -advantages * s.clip_c), worst)
    return (bounded * mask).sum() / mask.sum()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, rollouts: Rollouts, advantages: Tensor, s: Settings):
    """All optimizer steps on one batch; returns the loss of each."""
    rows, losses = len(advantages), []
    size = s.mini_batch * s.samples_per_prompt
    with torch.no_grad():
        old = response_log_probs(model, rollouts)
    for _ in range(s.epochs):
        for start in range(0, rows, size):
            chosen = torch.arange(start, min(start + size, rows))
            part = rollouts.rows(chosen)
            new = response_log_probs(model, part)
            loss = policy_loss(new, old[chosen], advantages[chosen, None], part.mask, s)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
            optimizer.step()
            losses.append(loss.item())
    return losses


def make_optimizer(model: nn.Module, s: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=s.learning_rate, weight_decay=s.weight_decay)


# ---- 4. The loop ----


@torch.no_grad()
def accuracy(model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: pd.DataFrame, s: Settings) -> float:
    """The share of greedy answers that are right."""
    prompts, prompt_mask = encode(tokenizer, data["prompt"])
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    responses, mask = sample(model, prompts, prompt_mask, s.max_new_tokens, end, pad, greedy=True)
    rollouts = Rollouts(prompts, responses, prompt_mask, mask, torch.arange(len(prompts)))
    return score(tokenizer, rollouts, [row["ground_truth"] for row in data["reward_model"]]).mean().item()


def train(model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: pd.DataFrame, steps: int, s: Settings) -> None:
    """Sample, score, update, `steps` times; one epoch after the other over shuffled prompts."""
    optimizer, rng, order = make_optimizer(model, s), random.Random(s.seed), []
    torch.manual_seed(s.seed)
    for step in range(steps):
        if len(order) < s.prompts_per_step:
            order = rng.sample(range(len(data)), len(data))
        batch = data.iloc[[order.pop() for _ in range(s.prompts_per_step)]]
        prompts, prompt_mask = (
            x.repeat_interleave(s.samples_per_prompt, 0) for x in encode(tokenizer, batch["prompt"])
        )
        groups = torch.arange(len(batch)).repeat_interleave(s.samples_per_prompt)
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        responses, mask = sample(model, prompts, prompt_mask, s.max_new_tokens, end, pad, greedy=False)
        rollouts = Rollouts(prompts, responses, prompt_mask, mask, groups)
        truths = [row["ground_truth"] for row in batch["reward_model"] for _ in range(s.samples_per_prompt)]
        rewards = score(tokenizer, rollouts, truths)
        for group in optimizer.param_groups:
            group["lr"] = s.learning_rate * min(1.0, (step + 1) / max(1, s.warmup_steps))
        losses = update(model, optimizer, rollouts, group_advantages(rewards, groups), s)
        print(f"step {step + 1:3}  reward {rewards.mean():.3f}  loss {sum(losses) / len(losses):+.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO on sums, in one file.")
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--train", required=True, help="parquet with the columns prompt and reward_model")
    parser.add_argument("--test", required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    settings = Settings(seed=arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    test = pd.read_parquet(arguments.test)
    print(f"held-out accuracy before: {accuracy(model, tokenizer, test, settings):.3f}", flush=True)
    train(model, tokenizer, pd.read_parquet(arguments.train), arguments.steps, settings)
    print(f"held-out accuracy after: {accuracy(model, tokenizer, test, settings):.3f}", flush=True)


if __name__ == "__main__":
    main()

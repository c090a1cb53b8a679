"""PPO in one file: sample, score, estimate advantages with a critic, take clipped steps. Nothing of verl is imported.

    python examples/single_file/ppo.py --model outputs/quickstart/sft/global_step_360/model/huggingface \
        --train outputs/quickstart/data/train.parquet --test outputs/quickstart/data/test.parquet

This is the algorithm that `python -m verl.trainer.main_ppo algorithm.adv_estimator=gae` runs, for one process and
models that fit into it: read it top to bottom. A test holds its losses against the library's on the library's rollouts.
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
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer, PreTrainedTokenizerBase

Trained = tuple[nn.Module, torch.optim.Optimizer]


@dataclass
class Settings:
    """Defaults are those of the quickstart."""

    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    mini_batch: int = 64  # prompts per optimizer step
    epochs: int = 1
    max_new_tokens: int = 8
    learning_rate: float = 2e-4
    critic_learning_rate: float = 1e-3
    critic_warmup: int = 5  # the actor waits for that step
    gamma: float = 1.0
    lam: float = 1.0
    clip_value: float = 0.5
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


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Rewards and values (B, T) -> whitened advantages and the critic's targets, (B, T)."""
    advantages, running, following = torch.zeros_like(values), torch.zeros(len(values)), torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        valid = mask[:, t].bool()
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = torch.where(valid, delta + gamma * lam * running, running)
        following = torch.where(valid, values[:, t], following)
        advantages[:, t] = running
    returns = (advantages + values) * mask
    chosen = advantages[mask.bool()]
    return (advantages - chosen.mean()) * torch.rsqrt(chosen.var() + 1e-8) * mask, returns


# ---- 3. The loss ----


def over_responses(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """(B, T, ...): the model's outputs in front of every response token; position t - 1 predicts token t."""
    ids = torch.cat([rollouts.prompts, rollouts.responses], dim=1)
    attention = torch.cat([rollouts.prompt_mask, rollouts.mask], dim=1)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=attention, position_ids=positions).logits.float()
    return logits[:, rollouts.prompts.shape[1] - 1 : -1]


def response_log_probs(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """(B, T): the log-probability of every response token, 0 behind the end."""
    log_probs = over_responses(model, rollouts).log_softmax(-1)
    found = log_probs.gather(-1, rollouts.responses[..., None])[..., 0]
    return torch.where(rollouts.mask.bool(), found, 0.0)


def response_values(critic: nn.Module, rollouts: Rollouts) -> Tensor:
    """(B, T): what the critic expects in front of every response token, 0 behind the end."""
    return torch.where(rollouts.mask.bool(), over_responses(critic, rollouts)[..., 0], 0.0)


def policy_loss(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, s: Settings) -> Tensor:
    """PPO's clipped loss, averaged over all tokens of the mini-batch."""
    ratio = (new - old).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    worst = torch.maximum(plain, clipped)
    bounded = torch.where(advantages < 0, torch.minimum(worst, -advantages * s.clip_c), worst)
    return (bounded * mask).sum() / mask.sum()


def value_loss(new: Tensor, old: Tensor, returns: Tensor, mask: Tensor, s: Settings) -> Tensor:
    """Half the squared error, and no credit for moving further than the clip."""
    clipped = torch.clamp(new, old - s.clip_value, old + s.clip_value)
    return 0.5 * (torch.maximum((new - returns) ** 2, (clipped - returns) ** 2) * mask).sum() / mask.sum()


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, s: Settings) -> float:
    """One optimizer step; returns the loss."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
    optimizer.step()
    return loss.item()


def update(actor: Trained | None, critic: Trained, rollouts: Rollouts, rewards: Tensor, s: Settings):
    """All optimizer steps on one batch; returns the losses of the actor (None: it waits) and of the critic."""
    size, losses, value_losses = s.mini_batch * s.samples_per_prompt, [], []
    with torch.no_grad():
        old_values = response_values(critic[0], rollouts)
        old = None if actor is None else response_log_probs(actor[0], rollouts)
    advantages, returns = gae(rewards, old_values, rollouts.mask, s.gamma, s.lam)
    parts = [
        torch.arange(i, min(i + size, len(rewards))) for _ in range(s.epochs) for i in range(0, len(rewards), size)
    ]
    for chosen in parts:
        part = rollouts.rows(chosen)
        loss = value_loss(response_values(critic[0], part), old_values[chosen], returns[chosen], part.mask, s)
        value_losses.append(step_on(*critic, loss, s))
    for chosen in parts if actor is not None else []:
        part = rollouts.rows(chosen)
        loss = policy_loss(response_log_probs(actor[0], part), old[chosen], advantages[chosen], part.mask, s)
        losses.append(step_on(*actor, loss, s))
    return losses, value_losses


# ---- 4. The loop ----


@torch.no_grad()
def accuracy(model: nn.Module, tokenizer: PreTrainedTokenizerBase, data: pd.DataFrame, s: Settings) -> float:
    """The share of greedy answers that are right."""
    prompts, prompt_mask = encode(tokenizer, data["prompt"])
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    responses, mask = sample(model, prompts, prompt_mask, s.max_new_tokens, end, pad, greedy=True)
    rollouts = Rollouts(prompts, responses, prompt_mask, mask)
    return score(tokenizer, rollouts, [row["ground_truth"] for row in data["reward_model"]]).mean().item()


def train(
    model: nn.Module, critic: nn.Module, tokenizer: PreTrainedTokenizerBase, data: pd.DataFrame, steps: int, s: Settings
) -> None:
    """Sample, score, update, `steps` times; one epoch after the other over shuffled prompts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.learning_rate, weight_decay=s.weight_decay)
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=s.critic_learning_rate, weight_decay=s.weight_decay)
    rng, order = random.Random(s.seed), []
    torch.manual_seed(s.seed)
    for step in range(1, steps + 1):
        if len(order) < s.prompts_per_step:
            order = rng.sample(range(len(data)), len(data))
        batch = data.iloc[[order.pop() for _ in range(s.prompts_per_step)]]
        prompts, prompt_mask = (
            x.repeat_interleave(s.samples_per_prompt, 0) for x in encode(tokenizer, batch["prompt"])
        )
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        responses, mask = sample(model, prompts, prompt_mask, s.max_new_tokens, end, pad, greedy=False)
        rollouts = Rollouts(prompts, responses, prompt_mask, mask)
        truths = [row["ground_truth"] for row in batch["reward_model"] for _ in range(s.samples_per_prompt)]
        scores = score(tokenizer, rollouts, truths)
        rewards = torch.zeros(mask.shape).scatter(1, mask.sum(-1, keepdim=True) - 1, scores[:, None])
        for group in optimizer.param_groups:
            group["lr"] = s.learning_rate * min(1.0, (step - s.critic_warmup + 1) / max(1, s.warmup_steps))
        actor = (model, optimizer) if step >= s.critic_warmup else None
        losses, value_losses = update(actor, (critic, critic_optimizer), rollouts, rewards, s)
        said = f"loss {sum(losses) / len(losses):+.4f}" if losses else "the critic warms up"
        print(f"step {step:3}  reward {scores.mean():.3f}  {said}  value {value_losses[-1]:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on sums, in one file.")
    for name in ("--model", "--train", "--test"):  # a Hugging Face folder, and parquet with prompt and reward_model
        parser.add_argument(name, required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    settings = Settings(seed=arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    test = pd.read_parquet(arguments.test)
    print(f"held-out accuracy before: {accuracy(model, tokenizer, test, settings):.3f}", flush=True)
    # The policy's body with a head that says one number per token.
    critic = AutoModelForTokenClassification.from_pretrained(arguments.model, num_labels=1, dtype=torch.float32)
    train(model, critic, tokenizer, pd.read_parquet(arguments.train), arguments.steps, settings)
    print(f"held-out accuracy after: {accuracy(model, tokenizer, test, settings):.3f}", flush=True)


if __name__ == "__main__":
    main()

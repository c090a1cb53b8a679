"""A short run in which the answers of SmolLM2-135M-Instruct, a published model, become numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.harness.programs import trained

STEPS = 3
DIGITS = '''"""The share of digits in an answer: "Answer with the number only." """


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
'''
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def to_digits(published: Path, task: Path, name: str, *words: str) -> list[dict]:
    """The steps of a GRPO run on the digits' share; the last but one is saved."""
    settings = (
        "algorithm.adv_estimator=grpo",
        "data.train_files=data/train.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        f"actor_rollout_ref.model.path={published}",
        f"{R}.n=8",
        f"{R}.calculate_log_probs=true",
        f"{A}.ppo_mini_batch_size=4",
        f"{A}.optim.lr=1e-4",
        "reward.custom_reward_function.path=digits.py",
        "trainer.skip_old_log_prob=false",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS - 1}",
    )
    return trained(task, name, *words, *settings)


def digits(folder: Path) -> float:
    """The share of digits in transformers' samples from a folder: 32 answers of at most 12 tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    message = [{"role": "user", "content": "What is 44 plus 34? Answer with the number only."}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(0)
    ids = model.generate(**prompt, do_sample=True, max_new_tokens=12, num_return_sequences=32, top_k=0)
    texts = tokenizer.batch_decode(ids[:, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(sum(map(str.isdigit, text)) / max(1, len(text)) for text in texts) / len(texts)

"""How a command of the guides is made small enough for a test, and what one process has to swap of it."""

from __future__ import annotations

from typing import Any

from tests.brief.machine import resolve
from tests.brief.table import Attempt
from verl.config.machine.topology import backend_of

PPO_SIZES = {
    "data.train_files": "train.parquet",
    "data.val_files": "train.parquet",
    "data.train_batch_size": "2",
    "data.max_prompt_length": "64",
    "data.max_response_length": "4",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "2",
    "actor_rollout_ref.rollout.n": "2",
    "reward.custom_reward_function.path": "scorer.py",
    "trainer.total_training_steps": "1",
    "trainer.logger": "[file]",
    "trainer.project_name": "guide",
    "trainer.experiment_name": "run",
}
ONE_PROCESS = {
    "actor_rollout_ref.rollout.name": "hf",
    "trainer.n_gpus_per_node": "1",
    "trainer.nnodes": "1",
}
"""What a run of `test_runs` has whatever is printed; `swapped` says where that is another thing."""
SFT_SIZES = {
    "data.train_files": "chats.parquet",
    "data.val_files": "chats.parquet",
    "data.train_batch_size": "2",
    "data.max_length": "64",
    "model.path": "model",
    "trainer.total_training_steps": "1",
    "trainer.logger": "[file]",
    "trainer.project_name": "guide",
    "trainer.experiment_name": "run",
}
ELSEWHERE = {
    "critic.model.path": "model",
    "critic.ppo_mini_batch_size": "2",
    "custom_reward_function.path": "scorer.py",
}
"""What is made small only where a command prints it."""


def small(attempt: Attempt, rows: int = 2) -> list[str]:
    """The command with its sizes, paths and place of logs replaced, and nothing else.

    Args:
        rows: prompts of a step.
    """
    if attempt.program in ("dpo_trainer", "rm_trainer"):
        return _with(attempt.words, SFT_SIZES | dict.fromkeys(("data.train_files", "data.val_files"), "pairs.parquet"))
    if attempt.program != "ppo_trainer":
        return _with(attempt.words, SFT_SIZES)
    batch = ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")
    return _with(attempt.words, PPO_SIZES | dict.fromkeys(batch, str(rows)))


def in_one_process(attempt: Attempt) -> list[str]:
    """`small`, with the built-in sampler in one process."""
    return _with(small(attempt), ONE_PROCESS) if attempt.program == "ppo_trainer" else small(attempt)


def _with(words: list[str], settings: dict[str, str]) -> list[str]:
    words = [word for word in words if word.lstrip("+").partition("=")[0] not in settings]
    keys = [word.partition("=")[0] for word in words]
    if "custom_reward_function.path" in keys:
        settings = {key: value for key, value in settings.items() if key != "reward.custom_reward_function.path"}
    words = [f"{key}={ELSEWHERE[key]}" if key in ELSEWHERE else word for key, word in zip(keys, words)]
    return [*words, *(f"{key}={value}" for key, value in settings.items())]


def swapped(attempt: Attempt) -> list[str]:
    """What one process has in place of the printed engine, sampler or number of processes; on the guides' machine.

    Example:
        >>> swapped(Attempt("actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8"))
        ['plain for fsdp2', 'hf for vllm', '1 process for 8']
    """
    printed: Any = resolve(attempt)
    processes = printed.trainer.nnodes * (printed.trainer.n_gpus_per_node or 1)
    supervised = attempt.program != "ppo_trainer"
    strategy = printed.engine.strategy if supervised else printed.actor_rollout_ref.actor.strategy
    sampler = None if supervised else printed.actor_rollout_ref.rollout.name
    theirs, ours = backend_of(strategy, processes), backend_of(strategy, 1)
    told = [f"{ours} for {theirs}"] if ours != theirs else []
    told += [f"hf for {sampler}"] if sampler not in (None, "hf") else []
    return told + ([f"1 process for {processes}"] if processes > 1 else [])

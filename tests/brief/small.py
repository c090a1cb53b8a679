"""How a command of the guides is made small enough for a test, and what of it is then another thing than printed."""

from __future__ import annotations

from typing import Any

from tests.brief.machine import resolve
from tests.brief.table import Attempt
from verl.config.topology import backend_of

PPO_SIZES = {
    "data.train_files": "train.parquet",
    "data.val_files": "train.parquet",
    "data.train_batch_size": "2",
    "data.max_prompt_length": "64",
    "data.max_response_length": "4",
    "actor_rollout_ref.model.path": "model",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "2",
    "actor_rollout_ref.rollout.n": "2",
    "actor_rollout_ref.rollout.name": "hf",
    "reward.custom_reward_function.path": "scorer.py",
    "trainer.total_training_steps": "1",
    "trainer.n_gpus_per_node": "1",
    "trainer.nnodes": "1",
    "trainer.logger": "[file]",
    "trainer.project_name": "guide",
    "trainer.experiment_name": "run",
}
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
CRITIC_PATH = "critic.model.path"


def small(attempt: Attempt) -> list[str]:
    """The command with every size, path and place replaced; its algorithm and losses as they are printed."""
    sizes = dict(PPO_SIZES if attempt.program == "ppo_trainer" else SFT_SIZES)
    words = [word for word in attempt.words if word.lstrip("+").partition("=")[0] not in sizes]
    words = [f"{CRITIC_PATH}=model" if word.startswith(CRITIC_PATH) else word for word in words]
    return [*words, *(f"{key}={value}" for key, value in sizes.items())]


def swapped(attempt: Attempt) -> list[str]:
    """What the small run has in place of the printed engine, sampler or number of processes; on the guides' machine.

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

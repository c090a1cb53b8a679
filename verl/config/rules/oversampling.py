"""Rules about choosing prompts by how often they were answered rightly."""

from __future__ import annotations

from verl.config.rules.checks import Problems
from verl.config.schema.data import DataConfig
from verl.config.schema.root import PPOTrainerConfig
from verl.config.schema.tree import in_range
from verl.metrics import notice


def candidate_prompts(data: DataConfig, prompts: int) -> int:
    """Groups among which a step, or a part of one, chooses those of ``prompts`` that it trains on."""
    return int(prompts * data.oversample_factor)


def prompts_at_once(data: DataConfig) -> int:
    """Prompts that are sampled together."""
    return data.gen_batch_size or candidate_prompts(data, data.train_batch_size)


def key_of_prompts_at_once(cfg: PPOTrainerConfig) -> str:
    """The setting that says how many, for messages."""
    if cfg.trainer.v1.trainer_mode == "fully_async":  # where the number of prompts follows from these
        return "async_training.require_batches x actor_rollout_ref.actor.ppo_mini_batch_size"
    return "data.gen_batch_size" if cfg.data.gen_batch_size else "data.train_batch_size"


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What is wrong with it."""
    data, key = cfg.data, "data.oversample_factor"
    low, high = data.accuracy_lower_bound, data.accuracy_upper_bound
    problems = in_range(key, data.oversample_factor, "1 or more", data.oversample_factor >= 1)
    problems += in_range("data.accuracy_lower_bound", low, f"0 to accuracy_upper_bound={high}", 0 <= low <= high)
    return problems + in_range("data.accuracy_upper_bound", high, "at most 1", high <= 1)


def tell(cfg: PPOTrainerConfig) -> None:
    """Settings without effect in this run."""
    data, usual, key = cfg.data, DataConfig(), "data.oversample_factor"
    if data.oversample_factor == 1:
        for name in ("filter_accuracy", "filter_truncate"):
            if data[name] != usual[name]:
                notice(f"data.{name}", f"has no effect with {key}=1: every sampled prompt is trained on")
    elif not data.filter_accuracy and not data.filter_truncate:
        notice(key, "no filter is on, so the earliest prompts are trained on and the others dropped")
    if not data.filter_accuracy:
        for name in ("accuracy_lower_bound", "accuracy_upper_bound"):
            if data[name] != usual[name]:
                notice(f"data.{name}", "has no effect without data.filter_accuracy=true")

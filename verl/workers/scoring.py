"""The reward manager of a run: for the controller, and for workers that score beside sampling."""

from __future__ import annotations

from typing import Any

from verl.config import PPOTrainerConfig, replace
from verl.data import hf_tokenizer
from verl.rewards.early import EarlyScorer
from verl.rewards.loading import ServedModel
from verl.rewards.managers import load_reward_manager


def reward_manager(config: PPOTrainerConfig, tokenizer: Any, num_examine: int) -> Any:
    """The reward manager of ``reward.reward_manager`` with the scorer of ``reward.custom_reward_function``.

    With a reward model on a server both are told its address, and get its tokenizer if they ask for it.
    """
    model = config.reward.reward_model
    if not model.enable or model.rollout.name != "server":
        return load_reward_manager(config, tokenizer, num_examine=num_examine)
    served = ServedModel(
        address=str(model.rollout.server.url).split("://")[-1].rstrip("/"),
        tokenizer=lambda: (
            hf_tokenizer(
                model.model_path, key="reward.reward_model.model_path", trust_remote_code=model.trust_remote_code
            )
            if model.model_path
            else tokenizer
        ),
    )
    return load_reward_manager(config, tokenizer, served=served, num_examine=num_examine)


def early_scorer(config: PPOTrainerConfig, tokenizer: Any, workers: int) -> EarlyScorer | None:
    """What scores single rows while others are sampled; None where only whole batches can be scored.

    Args:
        tokenizer: of the policy; ``data.tokenizer`` wins, as it does where the batch is scored.
        workers: how many processes score; the rate limit is theirs together.
    """
    if config.data.tokenizer:
        tokenizer = hf_tokenizer(
            config.data.tokenizer, key="data.tokenizer", trust_remote_code=config.data.trust_remote_code
        )
    rate = config.reward.max_per_minute
    if rate is not None and workers > 1:
        config = replace(config, **{"reward.max_per_minute": rate / workers})
    return EarlyScorer.of(reward_manager(config, tokenizer, num_examine=0))

"""The reward manager of a run: for the controller, and for workers that score during sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.config import PPOTrainerConfig
from verl.config.schema.reward import RewardModelConfig
from verl.config.schema.root import queries_judges
from verl.data import hf_tokenizer
from verl.protocol.tokenizer import Tokenizer
from verl.rewards.early import EarlyScorer
from verl.rewards.loading import ServedModel
from verl.rewards.managers import load_reward_manager


def reward_manager(config: PPOTrainerConfig, tokenizer: Tokenizer, num_examine: int) -> Callable[..., dict[str, Any]]:
    """The reward manager of ``reward.reward_manager`` with the scorer of ``reward.custom_reward_function``.

    With a reward model on a server both get its address, and its tokenizer if they declare it. Where the run starts the
    servers, `verl.trainer.ppo.judging` has put their address into ``config``.
    """
    model = config.reward.reward_model
    if not queries_judges(config):
        return load_reward_manager(config, tokenizer, num_examine=num_examine)
    served = ServedModel(
        address=str(model.rollout.server.url).split("://")[-1].rstrip("/"),
        tokenizer=lambda: judge_tokenizer(model) if model.model_path else tokenizer,
    )
    return load_reward_manager(config, tokenizer, served=served, num_examine=num_examine)


def judge_tokenizer(model: RewardModelConfig) -> Tokenizer:
    """The tokenizer of ``reward.reward_model.model_path``."""
    return hf_tokenizer(
        model.model_path or "", key="reward.reward_model.model_path", trust_remote_code=model.trust_remote_code
    )


def early_scorer(config: PPOTrainerConfig, tokenizer: Tokenizer) -> EarlyScorer | None:
    """Scores single rows while others are sampled; None if only whole batches can be scored.

    Args:
        tokenizer: of the policy; ``data.tokenizer`` wins, as it does where the batch is scored.
    """
    if config.data.tokenizer:
        tokenizer = hf_tokenizer(
            config.data.tokenizer, key="data.tokenizer", trust_remote_code=config.data.trust_remote_code
        )
    return EarlyScorer.of(reward_manager(config, tokenizer, num_examine=0))

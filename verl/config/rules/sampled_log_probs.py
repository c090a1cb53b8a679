"""Where the log-probs that the sampler reports are not the trainer's, whose distribution is the model's at the temperature."""

from __future__ import annotations

from verl.config.rules.checks import Problems
from verl.config.schema.root import PPOTrainerConfig, corrects_rollout
from verl.errors import ConfigError
from verl.metrics import notice

_R = "actor_rollout_ref.rollout"


def tell(cfg: PPOTrainerConfig) -> None:
    """A notice for each difference."""
    rollout = cfg.actor_rollout_ref.rollout
    if cfg.data.min_response_length and rollout.ignore_eos:
        notice(
            "data.min_response_length", f"has no effect: {_R}.ignore_eos=true makes every response as long as can be"
        )
    compares = corrects_rollout(cfg) or cfg.algorithm.rollout_correction.bypass_mode
    filters, adjustments = _filters(cfg), _adjustments(cfg)
    if rollout.logprobs_mode == "raw_logprobs":
        _tell_raw(cfg, [*adjustments, *filters] if compares else [])
        return
    if filters and compares:
        notice(
            filters[0],
            "the sampler's log-probs are those of the filtered distribution, the trainer's are not: the rollout "
            "correction sees ratios of at most 1 even with equal weights",
        )
    if adjustments:
        also = f" (and {adjustments[1]})" if adjustments[1:] else ""
        then = (
            "the rollout correction" if compares else "training/rollout_probs_diff_* and algorithm.rollout_correction"
        )
        notice(
            adjustments[0],
            f"the sampler draws with it{also} and reports the log-probs of what it draws from; the trainer's are without "
            f"it. Only {then} {'sees' if compares else 'see'} the difference, even with equal weights",
        )


def problems(cfg: PPOTrainerConfig, key: str) -> Problems:
    """Raw log-probs at another temperature than the trainer's, which ``key`` would compare with them."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.logprobs_mode != "raw_logprobs" or rollout.temperature == 1:
        return []
    message = (
        f"{key} compares raw log-probs, of temperature 1, with the trainer's, of temperature {rollout.temperature}"
    )
    fix = f"Leave it out, or set {_R}.temperature=1."
    return [ConfigError(message, key=f"{_R}.logprobs_mode", got=rollout.logprobs_mode, fix=fix)]


def _tell_raw(cfg: PPOTrainerConfig, unseen: list[str]) -> None:
    rollout, key = cfg.actor_rollout_ref.rollout, f"{_R}.logprobs_mode"
    if not rollout.calculate_log_probs:
        notice(key, f"has no effect without {_R}.calculate_log_probs=true")
    elif rollout.temperature != 1:
        notice(
            key,
            f"raw log-probs are of temperature 1, the trainer's of temperature {rollout.temperature}: "
            "training/rollout_probs_diff_* shows both this and what differs between the engines",
        )
    elif unseen:
        notice(key, f"the rollout correction does not see that responses are drawn with {', '.join(unseen)}")


def _filters(cfg: PPOTrainerConfig) -> list[str]:
    rollout = cfg.actor_rollout_ref.rollout
    return [f"{_R}.top_p"] * (rollout.top_p < 1) + [f"{_R}.top_k"] * (rollout.top_k > 0)


def _adjustments(cfg: PPOTrainerConfig) -> list[str]:
    rollout = cfg.actor_rollout_ref.rollout
    shortest = cfg.data.min_response_length > 0 and not rollout.ignore_eos
    return [f"{_R}.repetition_penalty"] * (rollout.repetition_penalty != 1) + ["data.min_response_length"] * shortest

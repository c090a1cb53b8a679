"""Rules about estimators and policy losses with settings of their own: what each needs, and which settings do nothing."""

from __future__ import annotations

from verl.config import pairs
from verl.config.checks import Problems, in_range
from verl.config.root import ON_PAIRS, PPOTrainerConfig
from verl.errors import ConfigError

_A = "actor_rollout_ref.actor"
_L = f"{_A}.policy_loss"
BELONGS_TO: dict[str, tuple[str, ...]] = {
    f"{_L}.clip_cov_ratio": ("clip_cov",),
    f"{_L}.clip_cov_lb": ("clip_cov",),
    f"{_L}.clip_cov_ub": ("clip_cov",),
    f"{_L}.kl_cov_ratio": ("kl_cov",),
    f"{_L}.ppo_kl_coef": ("kl_cov",),
    f"{_L}.dro_beta": ("dro",),
    f"{_A}.tau_pos": ("sapo",),
    f"{_A}.tau_neg": ("sapo",),
    f"{_A}.sppo_eta": ("recipe.sppo.core:sppo",),
    f"{_A}.dpo_beta": ON_PAIRS,
}
"""Settings of the actor that only these policy losses read."""
OF_ESTIMATOR: dict[str, tuple[str, ...]] = {
    "algorithm.gdpo_reward_keys": ("gdpo",),
    "algorithm.gdpo_reward_weights": ("gdpo",),
    "algorithm.vapo_length_alpha": ("vapo",),
    "algorithm.vapo_lam_critic": ("vapo",),
    "algorithm.reward_dpo_coef": ("recipe.prime.core:leave_one_out",),
    "algorithm.reward_gt_coef": ("recipe.prime.core:leave_one_out",),
}
OWN_AGGREGATION = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "the mean over sequences"}


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What an estimator or a loss needs and does not have."""
    return [*_loss(cfg), *_estimator(cfg), *pairs.problems(cfg)]


def _loss(cfg: PPOTrainerConfig) -> Problems:
    actor = cfg.actor_rollout_ref.actor
    loss, found = actor.policy_loss, []
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        message = "the policy loss 'dro' has no default for the weight of its square"
        found.append(ConfigError(message, key=f"{_L}.dro_beta", got=None, allowed="above 0"))
    found += in_range(f"{_L}.dro_beta", loss.dro_beta, "above 0", loss.dro_beta is None or loss.dro_beta > 0)
    for name in ("clip_cov_ratio", "kl_cov_ratio"):
        found += in_range(f"{_L}.{name}", loss[name], "above 0, at most 1", 0 < loss[name] <= 1)
    coef = actor.positive_lm_coef
    found += in_range(f"{_A}.positive_lm_coef", coef, "0 or more", coef >= 0)
    for name in ("tau_pos", "tau_neg", "sppo_eta", "dpo_beta"):
        found += in_range(f"{_A}.{name}", actor[name], "above 0", actor[name] > 0)
    holds = loss.clip_cov_lb < loss.clip_cov_ub
    return found + in_range(f"{_L}.clip_cov_lb", loss.clip_cov_lb, f"below clip_cov_ub={loss.clip_cov_ub}", holds)


def _estimator(cfg: PPOTrainerConfig) -> Problems:
    algorithm, found = cfg.algorithm, []
    alpha, keys, weights = algorithm.vapo_length_alpha, algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    found += in_range("algorithm.vapo_length_alpha", alpha, "above 0, or null", alpha is None or alpha > 0)
    lam = algorithm.vapo_lam_critic
    found += in_range("algorithm.vapo_lam_critic", lam, "0 to 1", 0 <= lam <= 1)
    if algorithm.adv_estimator == "gdpo" and not keys:
        message, fix = "the estimator 'gdpo' normalises several rewards apart", "List the keys that the scorer returns."
        found.append(ConfigError(message, key="algorithm.gdpo_reward_keys", got=keys, fix=fix))
    if keys and weights is not None and len(weights) != len(keys):
        key = "algorithm.gdpo_reward_weights"
        found.append(ConfigError(f"{len(keys)} rewards have {len(weights)} weights", key=key, got=weights))
    return found


def without_effect(cfg: PPOTrainerConfig, changed: set[str]) -> dict[str, str]:
    """Changed settings that nothing reads in this run, each with what would give it effect."""
    mode, estimator = cfg.actor_rollout_ref.actor.policy_loss.loss_mode, cfg.algorithm.adv_estimator
    found = pairs.without_effect(cfg, changed)
    if "." in mode or ":" in mode or "." in estimator or ":" in estimator:
        return found  # a function of the person's own may read any of the others
    for chosen, key_of, table in (
        (mode, f"{_L}.loss_mode", BELONGS_TO),
        (estimator, "algorithm.adv_estimator", OF_ESTIMATOR),
    ):
        for key, owners in table.items():
            if key in changed and chosen not in owners:
                found[key] = f"has no effect without {key_of}={owners[0]}"
    if f"{_A}.loss_agg_mode" in changed and mode in OWN_AGGREGATION:
        found[f"{_A}.loss_agg_mode"] = f"does not change the policy loss {mode!r}, which takes {OWN_AGGREGATION[mode]}"
    if not cfg.algorithm.use_pf_ppo:
        for key in ("algorithm.pf_ppo.reweight_method", "algorithm.pf_ppo.weight_pow"):
            if key in changed:
                found[key] = "has no effect without algorithm.use_pf_ppo=true"
    return found

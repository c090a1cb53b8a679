"""Rules about training on samples that older versions of the policy have drawn: what needs new ones, what corrects."""

from __future__ import annotations

from verl.config.machine.pools import Pools
from verl.config.rules.checks import Problems
from verl.config.schema.root import (
    PPOTrainerConfig,
    corrects_rollout,
    learns_from_pairs,
    of_estimator,
    of_loss,
    of_schedule,
    sampler_is_old_policy,
    trains_on_older,
)
from verl.errors import ConfigError
from verl.metrics import notice

_MODE, _A, _NEWER = "trainer.v1.trainer_mode", "actor_rollout_ref.actor", "algorithm.rollout_correction"
_ROLLOUT = "actor_rollout_ref.rollout"


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What is right on policy only, in a run that is not; and log-probs of the sampler that are not kept."""
    reads = cfg.actor_rollout_ref.actor.use_rollout_log_probs
    problems: Problems = []
    if reads and not cfg.actor_rollout_ref.rollout.calculate_log_probs:
        message, key = "the loss reads the sampler's log-probs, which are not kept", f"{_A}.use_rollout_log_probs"
        problems.append(ConfigError(message, key=key, got=True, fix=f"Set {_ROLLOUT}.calculate_log_probs=true."))
    if not trains_on_older(cfg):
        return problems
    by, sync = _cause(cfg)
    estimator, older = cfg.algorithm.adv_estimator, f"{by} trains on samples of older versions of the policy"
    if of_estimator(cfg).on_policy:
        message = f"this estimator is right for samples of the policy itself, and {older}"
        fix = f"Take another estimator, such as rloo, {sync}"
        problems.append(ConfigError(message, key="algorithm.adv_estimator", got=estimator, fix=fix))
    loss = cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    if of_loss(cfg).on_policy and not weighs_samples(cfg):
        message = f"this loss has no ratio to the policy that drew a sample, and {older}"
        fix = f"Set {_NEWER}.rollout_is=token, take another loss, {sync}"
        problems.append(ConfigError(message, key=f"{_A}.policy_loss.loss_mode", got=loss, fix=fix))
    return problems


def _cause(cfg: PPOTrainerConfig) -> tuple[str, str]:
    """The setting that makes a run train on older samples, and how to end that."""
    if of_schedule(cfg).off_policy:
        return f"{_MODE}={cfg.trainer.v1.trainer_mode}", f"or set {_MODE}=sync."
    return f"{_ROLLOUT}.keep_unfinished=true", f"or set {_ROLLOUT}.keep_unfinished=false."


def weighs_samples(cfg: PPOTrainerConfig) -> bool:
    """Whether importance weights from outside the loss are applied."""
    algorithm, newer = cfg.algorithm, cfg.algorithm.rollout_correction
    return (algorithm.rollout_is and algorithm.rollout_is_threshold is not None) or (
        newer.rollout_is is not None and not newer.bypass_mode
    )


def tell(cfg: PPOTrainerConfig) -> None:
    """Samples that nothing corrects for, and halves of steps that cannot overlap."""
    if not of_schedule(cfg).off_policy:
        return
    mode = cfg.trainer.v1.trainer_mode
    if not (sampler_is_old_policy(cfg) or corrects_rollout(cfg) or learns_from_pairs(cfg)):
        notice(
            _NEWER,
            f"{_MODE}={mode} trains on samples of older versions, and nothing corrects for that: "
            f"{_NEWER}.bypass_mode=true takes the sampler as the old policy, {_NEWER}.rollout_is weighs the samples",
        )
    pools = Pools.of(cfg)
    if pools.of_role("rollout") == pools.of_role("actor"):
        notice(
            _MODE,
            f"{mode}: the samplers share the trainers' processes, so sampling and training take turns; they overlap with "
            f"actor_rollout_ref.hybrid_engine=false {_ROLLOUT}.nnodes=1 {_ROLLOUT}.n_gpus_per_node=<processes>",
        )

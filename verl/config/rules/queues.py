"""Rules of the schedules with a queue: the arithmetic of their bound, and what groups on their own cannot have."""

from __future__ import annotations

import math

from verl.config.machine.pools import Pools
from verl.config.rules.checks import Problems, out_of_bounds, tell_names
from verl.config.schema.node import changed_names
from verl.config.schema.root import (
    PPOTrainerConfig,
    candidate_prompts,
    corrects_rollout,
    of_schedule,
    sampler_is_old_policy,
)
from verl.errors import ConfigError
from verl.metrics import notice

_MODE, _RULES, _ASYNC = "trainer.v1.trainer_mode", "trainer.v1.sampler", "async_training"
_R, _MINI, _TRAIN = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_batch_size"


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Every reason why a queue cannot keep its bound, with the numbers."""
    if not of_schedule(cfg).queue:
        return []
    if any(str(problem.key).startswith((_ASYNC, "trainer.v1.")) for problem in out_of_bounds(cfg)):
        return []  # refused at the settings
    return [*_step(cfg), *_bound(cfg), *_groups(cfg)]


def _step(cfg: PPOTrainerConfig) -> Problems:
    """A step is a number of chunks; the two settings that say how many must agree."""
    train, mini, stream = cfg.data.train_batch_size, cfg.actor_rollout_ref.actor.ppo_mini_batch_size, cfg.async_training
    mode = cfg.trainer.v1.trainer_mode
    if mode == "separate_async":
        times = cfg.trainer.v1.separate_async.parameter_sync_step
        key, product = "trainer.v1.separate_async.parameter_sync_step", f"{times} mini-batches x {mini} prompts"
        prompts = times * mini
    elif mode == "fully_async":
        key = f"{_ASYNC}.trigger_parameter_sync_step"
        times, each = stream.trigger_parameter_sync_step, stream.require_batches
        prompts, product = times * each * mini, f"{times} times {each} mini-batches x {mini} prompts"
    else:
        return []
    if prompts == train:
        return []
    message = f"weights are sent after {product} = {prompts} prompts, and a step trains on {train}"
    return [ConfigError(message, key=key, got=times, fix=f"Set {_TRAIN}={prompts}, or other mini-batches.")]


def _bound(cfg: PPOTrainerConfig) -> Problems:
    rules, mode = cfg.trainer.v1.sampler, cfg.trainer.v1.trainer_mode
    allowed, key = rules.max_off_policy_threshold, f"{_RULES}.max_off_policy_threshold"
    problems: Problems = []
    if mode != "fully_async" and allowed is not None:
        warmup = cfg.trainer.v1[mode].num_warmup_batches
        prompts = candidate_prompts(cfg.data, cfg.data.train_batch_size)
        ahead = math.floor(warmup * prompts)
        needed = -(-ahead // prompts)
        if needed > allowed:
            message = (
                f"{warmup:g} warm-up batches x {prompts} prompts = {ahead} prompts are sampled before "
                f"the step that trains on them begins, so tokens are up to {needed} versions old"
            )
            fix = f"Set trainer.v1.{mode}.num_warmup_batches={allowed}, or {key}={needed}."
            problems.append(ConfigError(message, key=key, got=allowed, allowed=f"{needed} or more", fix=fix))
    if rules.order == "completion" and not (corrects_rollout(cfg) or sampler_is_old_policy(cfg)):
        message = "samples of any age are trained on, and nothing corrects for their age"
        fix = "Set algorithm.rollout_correction.rollout_is=token, or {}."
        if mode != "fully_async" and allowed is None:  # the schedule then treats every strategy as reweight
            problems.append(ConfigError(message, key=key, got=None, fix=fix.format("a limit")))
        elif rules.max_off_policy_strategy == "reweight":
            key, fix = f"{_RULES}.max_off_policy_strategy", fix.format("wait, or drop")
            problems.append(ConfigError(message, key=key, got="reweight", fix=fix))
    return problems


def _groups(cfg: PPOTrainerConfig) -> Problems:
    """Groups are sampled on their own, so nothing may be said of the batch that they were sampled with."""
    rollout, mode, problems = cfg.actor_rollout_ref.rollout, cfg.trainer.v1.trainer_mode, list[ConfigError]()
    if rollout.over_sample_rate:
        why = f"{_MODE}={mode} samples groups on their own, and an early stop is of one batch that all samples are in"
        fix = f"Leave it out; {_RULES}.order=completion lets no group wait for a slow one."
        problems.append(ConfigError(why, key=f"{_R}.over_sample_rate", got=rollout.over_sample_rate, fix=fix))
    if cfg.skip.rollout.enable:
        message = f"skip.rollout replays batches of a step, and {_MODE}={mode} trains from a queue of groups"
        problems.append(ConfigError(message, key="skip.rollout.enable", got=True, fix=f"Set {_MODE}=sync."))
    return problems


def samples_while_training(cfg: PPOTrainerConfig) -> bool:
    """Whether groups are sampled while the trainers train: there is a queue, and the samplers have a pool of their own."""
    pools = Pools.of(cfg)
    return of_schedule(cfg).queue and pools.of_role("rollout") != pools.of_role("actor")


def tell(cfg: PPOTrainerConfig) -> None:
    """A notice of every setting of another schedule."""
    mode, has_queue, v1 = cfg.trainer.v1.trainer_mode, of_schedule(cfg).queue, cfg.trainer.v1
    sections = {f"trainer.v1.{name}": v1[name] for name in ("colocate_async", "separate_async") if name != mode}
    for key, section in sections.items():
        tell_names(key, changed_names(section), f"has no effect with {_MODE}={mode}")
    if mode != "fully_async":
        shared = ["concurrent_samples_per_replica"] if has_queue else []
        names = [name for name in changed_names(cfg.async_training) if name not in shared]
        tell_names(_ASYNC, names, f"has no effect with {_MODE}={mode}")
    if cfg.actor_rollout_ref.rollout.free_cache_engine and samples_while_training(cfg):
        why = f"has no effect: under {_MODE}={mode} samplers in a pool of their own sample while the trainers train"
        notice(f"{_R}.free_cache_engine", why)
    rules = changed_names(v1.sampler)
    if not has_queue:
        tell_names(_RULES, rules, f"has no effect with {_MODE}={mode}, which has no queue")
    elif v1.sampler.order == "admission":
        names = [name for name in rules if name == "max_off_policy_strategy"]
        tell_names(_RULES, names, "has no effect in order of admission, where no group becomes too old")

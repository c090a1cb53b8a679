"""Rules about learning from pairs of sampled answers, and about a reference policy that moves."""

from __future__ import annotations

from verl.config.machine.pools import Pools
from verl.config.rules.checks import Problems
from verl.config.rules.shared_rows import sequence_ranks
from verl.config.rules.validate_megatron import roles
from verl.config.schema.bounds import in_range
from verl.config.schema.root import PPOTrainerConfig, corrects_rollout, learns_from_pairs, uses_reference
from verl.errors import ConfigError, NotBuiltError

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_FREQ = "trainer.ref_update_freq"
_ON_RATIOS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What pairs and a moving reference need and do not have."""
    problems = _moving_reference(cfg)
    if learns_from_pairs(cfg):
        problems += [*_samples(cfg), *_ranks(cfg), *_micro_batches(cfg), *_contradictions(cfg)]
    return problems


def _moving_reference(cfg: PPOTrainerConfig) -> Problems:
    steps, model = cfg.trainer.ref_update_freq, cfg.actor_rollout_ref.model
    if steps is None:
        return []
    problems = in_range(_FREQ, steps, "1 or more; null: never", steps >= 1)
    if model.lora_rank or model.lora_adapter_path:
        message = (
            "beside LoRA the reference is the model without its adapter, which has no weights of its own to change"
        )
        fix = "Set actor_rollout_ref.model.lora_rank=0 to train all weights, or trainer.ref_update_freq=null."
        problems.append(ConfigError(message, key=_FREQ, got=steps, fix=fix))
    if "ref" in Pools.of(cfg).named:
        message = "a reference policy in processes of its own that takes over the actor's weights is not built yet"
        fix = "Leave ref out of trainer.resource_pools: it then lives beside the actor."
        problems.append(NotBuiltError(message, key=_FREQ, got=steps, fix=fix))
    return problems


def _samples(cfg: PPOTrainerConfig) -> Problems:
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.n < 2:
        message = "a pair is the best and the worst of several answers to one prompt"
        return [ConfigError(message, key=f"{_R}.n", got=rollout.n, allowed="2 or more", fix=f"Set {_R}.n=2.")]
    if not rollout.do_sample:
        message = "greedy answers to one prompt are all the same, so none of them is better"
        return [ConfigError(message, key=f"{_R}.do_sample", got=False, fix=f"Set {_R}.do_sample=true.")]
    return []


def _ranks(cfg: PPOTrainerConfig) -> Problems:
    prompts, processes = cfg.actor_rollout_ref.actor.ppo_mini_batch_size, Pools.of(cfg).of_role("actor").size
    if processes < 1 or prompts < 1 or prompts % processes == 0:
        return []
    return [
        ConfigError(
            f"each of {processes} processes gets as many whole pairs as the others, one for each prompt",
            key=f"{_A}.ppo_mini_batch_size",
            got=prompts,
            allowed=f"a multiple of {processes}",
            fix="Change it, or the number of processes (trainer.nnodes, trainer.n_gpus_per_node).",
        )
    ]


def _micro_batches(cfg: PPOTrainerConfig) -> Problems:
    actor, data = cfg.actor_rollout_ref.actor, cfg.data
    if actor.use_dynamic_bsz:
        key, shared = f"{_A}.ppo_max_token_len_per_gpu", [sequence_ranks(role) for role in roles(cfg) if role.key == _A]
        needed = -(-2 * (data.max_prompt_length + data.max_response_length) // max(1, *shared))
        if actor.ppo_max_token_len_per_gpu >= needed:
            return []
        message = "the two rows of a pair may have twice data.max_prompt_length + data.max_response_length tokens"
        if max(1, *shared) > 1:
            message += f", of which each of {shared[0]} processes has its share"
        got, fix = actor.ppo_max_token_len_per_gpu, f"Set {key}={needed}."
        return [ConfigError(message, key=key, got=got, allowed=f"{needed} or more", fix=fix)]
    problems: Problems = []
    processes = max(1, Pools.of(cfg).of_role("actor").size)
    for name, least in (("ppo_micro_batch_size_per_gpu", 2), ("ppo_micro_batch_size", 2 * processes)):
        rows = actor[name]
        if rows is not None and 0 < rows < least:
            message, key = "the two rows of a pair go through the model together", f"{_A}.{name}"
            fix = f"Set {key}={least}."
            problems.append(ConfigError(message, key=key, got=rows, allowed=f"{least} or more", fix=fix))
    return problems


def _contradictions(cfg: PPOTrainerConfig) -> Problems:
    algorithm, problems = cfg.algorithm, []
    if algorithm.use_pf_ppo:
        message = "rows that are drawn one by one are no pairs"
        fix = "Leave it out: the best and the worst answer are taken."
        problems.append(ConfigError(message, key="algorithm.use_pf_ppo", got=True, fix=fix))
    if corrects_rollout(cfg) or algorithm.rollout_correction.bypass_mode:
        message = "the loss on pairs knows neither importance weights nor rejected tokens"
        fix = f"Leave algorithm.rollout_correction and algorithm.rollout_is_threshold out, or take another {_A}.policy_loss.loss_mode."
        problems.append(ConfigError(message, key="algorithm.rollout_correction", fix=fix))
    if cfg.actor_rollout_ref.actor.strategy == "megatron":
        message = "Megatron-Core's engine does not keep the rows of a pair in one micro-batch yet"
        fix = f"Set {_A}.strategy=fsdp2."
        problems.append(NotBuiltError(message, key=f"{_A}.strategy", got="megatron", fix=fix))
    return problems


def without_effect(cfg: PPOTrainerConfig, changed: set[str]) -> dict[str, str]:
    """Settings that nothing reads in this run, each with why."""
    actor, idle = cfg.actor_rollout_ref.actor, {}
    if cfg.trainer.ref_update_freq is not None and not uses_reference(cfg):
        idle[_FREQ] = f"has no effect without a reference policy ({_A}.use_kl_loss, algorithm.use_kl_in_reward)"
    if not learns_from_pairs(cfg):
        return idle
    for key in (f"{_A}.{name}" for name in _ON_RATIOS):
        if key in changed:
            idle[key] = "has no effect: the loss on pairs has no ratio to clip"
    key = f"{_A}.loss_agg_mode"
    if key in changed and not (actor.use_kl_loss or actor.entropy_coeff):
        idle[key] = "has no effect: the loss on pairs is a mean over pairs"
    return idle

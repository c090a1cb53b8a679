"""Rules about estimators and losses: what each needs, which settings do nothing, pairs of answers, the exact KL.

The KL over the full vocabulary (``full``) takes two models' logits on one worker: the reference runs inside the actor's
passes, so it must be colocated with the actor, and neither may cut its vocabulary or its rows over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.config.machine.pools import Pools, roles
from verl.config.rules.checks import NOTICE, Problems, Rule, Text, value_at
from verl.config.rules.runs import sequence_ranks
from verl.config.schema.node import changed_names
from verl.config.schema.root import (
    PPOTrainerConfig,
    corrects_rollout,
    kl_kinds,
    learns_from_pairs,
    of_estimator,
    of_loss,
    of_schedule,
    sampler_is_old_policy,
    trains_on_older,
    uses_reference,
)
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice
from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, is_dotted

_POLICY, _A, _R = "actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_FREQ, _MODE, _NEWER = "trainer.ref_update_freq", "trainer.v1.trainer_mode", "algorithm.rollout_correction"
_ON_RATIOS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
_INSTEAD = "Or take low_var_kl, an estimate of the same KL from the sampled tokens."


def _exact(cfg: PPOTrainerConfig) -> list[str]:
    """The settings by which this run computes an exact KL."""
    return [key for key, kind in kl_kinds(cfg).items() if kind == "full"]


def _no_exact_kl(why: str, when: Callable[[Any], Any], instead: str) -> Rule:
    message = f"the exact KL needs the logits of both models on one worker, and {why}"
    return Rule(
        lambda cfg: _exact(cfg)[0],
        message,
        lambda cfg: _exact(cfg) and when(cfg),
        f"Set {instead}. {_INSTEAD}",
        kind=NotBuiltError,
    )


def _cut_logits(role: str) -> tuple[Rule, ...]:
    def on(strategy: str) -> Callable[[Any], bool]:
        return lambda cfg: cfg.actor_rollout_ref[role].strategy == strategy

    def shares_rows(cfg: PPOTrainerConfig) -> bool:
        section = cfg.actor_rollout_ref[role]
        sizes_count = section.strategy not in ("megatron", "torchtitan")
        return sizes_count and section.fsdp_config.ulysses_sequence_parallel_size > 1

    fsdp2, whole_rows = (
        f"{_POLICY}.{role}.strategy=fsdp2",
        f"{_POLICY}.{role}.fsdp_config.ulysses_sequence_parallel_size=1",
    )
    return (
        _no_exact_kl("Megatron-Core's engine shards the vocabulary over its ranks", on("megatron"), fsdp2),
        _no_exact_kl("it was not tried on TorchTitan's models", on("torchtitan"), fsdp2),
        _no_exact_kl("several ranks share a row", shares_rows, whole_rows),
    )


def _pools_differ(cfg: PPOTrainerConfig) -> bool:
    pools = Pools.of(cfg)
    return pools.of_role("actor") != pools.of_role("ref")


def _of_pairs(name: str, says: Text, when: Callable[[Any], Any], fix: str, **more: Any) -> Rule:
    return Rule(name, says, lambda cfg: learns_from_pairs(cfg) and when(cfg), fix, **more)


def _cause(cfg: PPOTrainerConfig) -> str:
    """The setting that makes a run train on samples of older versions."""
    if of_schedule(cfg).off_policy:
        return f"{_MODE}={cfg.trainer.v1.trainer_mode}"
    return f"{_R}.keep_unfinished=true"


def _ends(cfg: PPOTrainerConfig) -> str:
    return f"or set {_MODE}=sync." if of_schedule(cfg).off_policy else f"or set {_R}.keep_unfinished=false."


def weighs_samples(cfg: PPOTrainerConfig) -> bool:
    """Whether importance weights from outside the loss are applied."""
    algorithm, newer = cfg.algorithm, cfg.algorithm.rollout_correction
    return (algorithm.rollout_is and algorithm.rollout_is_threshold is not None) or (
        newer.rollout_is is not None and not newer.bypass_mode
    )


def _moves(cfg: PPOTrainerConfig) -> bool:
    return cfg.trainer.ref_update_freq is not None


def _corrects_nothing(cfg: PPOTrainerConfig) -> bool:
    return not (sampler_is_old_policy(cfg) or corrects_rollout(cfg) or learns_from_pairs(cfg))


ROWS = (
    _no_exact_kl("the fused head never has the logits", lambda cfg: cfg.actor_rollout_ref.model.use_fused_kernels,
                 f"{_POLICY}.model.use_fused_kernels=false"),
    *_cut_logits("actor"),
    *_cut_logits("ref"),
    Rule(lambda cfg: _exact(cfg)[0],
         lambda cfg: "the exact KL needs the logits of both models on one worker, and the reference policy is not on those of "
         f"the actor, in the pool {Pools.of(cfg).of_role('ref').name!r}",
         lambda cfg: _exact(cfg) and _pools_differ(cfg), f"Set trainer.resource_pools without ref. {_INSTEAD}",
         kind=NotBuiltError),
    Rule("algorithm.kl_penalty", "the bypass mode has of the old policy only what the sampler tells of the sampled tokens",
         lambda cfg: "algorithm.kl_penalty" in _exact(cfg) and cfg.algorithm.rollout_correction.bypass_mode,
         f"Set {_NEWER}.bypass_mode=false. {_INSTEAD}"),
    Rule(lambda cfg: f"algorithm.{of_estimator(cfg).rewards}",
         "the estimator {algorithm.adv_estimator!r} normalises each of several rewards",
         lambda cfg: of_estimator(cfg).rewards is not None and not cfg.algorithm[of_estimator(cfg).rewards],
         "List the keys that the scorer returns."),
    Rule("algorithm.gdpo_reward_weights",
         lambda cfg: f"{len(cfg.algorithm.gdpo_reward_keys)} rewards have {len(cfg.algorithm.gdpo_reward_weights)} weights",
         lambda cfg: cfg.algorithm.gdpo_reward_keys and cfg.algorithm.gdpo_reward_weights is not None
         and len(cfg.algorithm.gdpo_reward_weights) != len(cfg.algorithm.gdpo_reward_keys)),

    # a reference policy that moves
    Rule(_FREQ, "out of range", lambda cfg: _moves(cfg) and cfg.trainer.ref_update_freq < 1, allowed="1 or more; null: never"),
    Rule(_FREQ, "with LoRA the reference is the model without its adapter, which has no weights of its own to change",
         lambda cfg: _moves(cfg) and (cfg.actor_rollout_ref.model.lora_rank or cfg.actor_rollout_ref.model.lora_adapter_path),
         "Set actor_rollout_ref.model.lora_rank=0 to train all weights, or trainer.ref_update_freq=null."),
    Rule(_FREQ, "a reference policy in processes of its own that takes over the actor's weights is not built yet",
         lambda cfg: _moves(cfg) and "ref" in Pools.of(cfg).named,
         "Leave ref out of trainer.resource_pools: it then shares the processes of the actor.", kind=NotBuiltError),

    # pairs of answers
    _of_pairs(f"{_R}.n", "a pair is the best and the worst of several answers to one prompt",
              lambda cfg: cfg.actor_rollout_ref.rollout.n < 2, "Set {key}=2.", allowed="2 or more"),
    _of_pairs(f"{_R}.do_sample", "greedy answers to one prompt are all the same, so none of them is better",
              lambda cfg: cfg.actor_rollout_ref.rollout.n > 1 and not cfg.actor_rollout_ref.rollout.do_sample,
              "Set {key}=true."),
    _of_pairs("algorithm.use_pf_ppo", "rows that are drawn one by one are no pairs", lambda cfg: cfg.algorithm.use_pf_ppo,
              "Leave it out: the best and the worst answer are taken."),
    _of_pairs(_NEWER, "the loss on pairs knows neither importance weights nor rejected tokens",
              lambda cfg: corrects_rollout(cfg) or cfg.algorithm.rollout_correction.bypass_mode,
              "Leave algorithm.rollout_correction and algorithm.rollout_is_threshold out, or take another "
              f"{_A}.policy_loss.loss_mode.", shows=False),
    _of_pairs(f"{_A}.strategy", "Megatron-Core's engine does not keep the rows of a pair in one micro-batch yet",
              lambda cfg: cfg.actor_rollout_ref.actor.strategy == "megatron", "Set {key}=fsdp2.", kind=NotBuiltError),

    # samples of older versions of the policy
    Rule(f"{_A}.use_rollout_log_probs", "the loss reads the sampler's log-probs, which are not kept",
         lambda cfg: cfg.actor_rollout_ref.actor.use_rollout_log_probs
         and not cfg.actor_rollout_ref.rollout.calculate_log_probs, f"Set {_R}.calculate_log_probs=true."),
    Rule("algorithm.adv_estimator",
         lambda cfg: f"this estimator is right for samples of the policy itself, and {_cause(cfg)} trains on samples of older "
         "versions of the policy", lambda cfg: trains_on_older(cfg) and of_estimator(cfg).on_policy,
         lambda cfg: f"Take another estimator, such as rloo, {_ends(cfg)}"),
    Rule(f"{_A}.policy_loss.loss_mode",
         lambda cfg: f"this loss has no ratio to the policy that drew a sample, and {_cause(cfg)} trains on samples of older "
         "versions of the policy",
         lambda cfg: trains_on_older(cfg) and of_loss(cfg).on_policy and not weighs_samples(cfg),
         lambda cfg: f"Set {_NEWER}.rollout_is=token, take another loss, {_ends(cfg)}"),
    Rule(_NEWER, lambda cfg: f"{_MODE}={cfg.trainer.v1.trainer_mode} trains on samples of older versions, and nothing "
         f"corrects for that: {_NEWER}.bypass_mode=true takes the sampler as the old policy, {_NEWER}.rollout_is weighs the "
         "samples", lambda cfg: of_schedule(cfg).off_policy and _corrects_nothing(cfg), kind=NOTICE),
    Rule(_MODE, "{got}: the samplers share the trainers' processes, so sampling and training take turns; they overlap with "
         f"actor_rollout_ref.hybrid_engine=false {_R}.nnodes=1 {_R}.n_gpus_per_node=<processes>",
         lambda cfg: of_schedule(cfg).off_policy and Pools.of(cfg).of_role("rollout") == Pools.of(cfg).of_role("actor"),
         kind=NOTICE),
    Rule(_FREQ, f"has no effect without a reference policy ({_A}.use_kl_loss, algorithm.use_kl_in_reward)",
         lambda cfg: _moves(cfg) and not uses_reference(cfg), kind=NOTICE),
)  # fmt: skip


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Settings without a default that the loss needs, and what pairs need of mini-batches and micro-batches."""
    loss = cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    message = f"the policy loss {loss!r} has no default for it"
    missing = [name for name in of_loss(cfg).required if value_at(cfg.actor_rollout_ref.actor, name) is None]
    unset = [ConfigError(message, key=f"{_A}.{name}", got=None, fix="Set it.") for name in missing]
    return [*unset, *_pairs_per_rank(cfg), *_pairs_per_pass(cfg)] if learns_from_pairs(cfg) else unset


def _pairs_per_rank(cfg: PPOTrainerConfig) -> Problems:
    prompts, processes = cfg.actor_rollout_ref.actor.ppo_mini_batch_size, Pools.of(cfg).of_role("actor").size
    if processes < 1 or prompts < 1 or prompts % processes == 0:
        return []
    message = f"each of {processes} processes gets as many whole pairs as the others, one for each prompt"
    key, allowed = f"{_A}.ppo_mini_batch_size", f"a multiple of {processes}"
    fix = "Change it, or the number of processes (trainer.nnodes, trainer.n_gpus_per_node)."
    return [ConfigError(message, key=key, got=prompts, allowed=allowed, fix=fix)]


def _pairs_per_pass(cfg: PPOTrainerConfig) -> Problems:
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
    least = {"ppo_micro_batch_size_per_gpu": 2, "ppo_micro_batch_size": 2 * max(1, Pools.of(cfg).of_role("actor").size)}
    message = "the two rows of a pair go through the model together"
    return [
        ConfigError(message, key=f"{_A}.{name}", got=actor[name], allowed=f"{n} or more", fix=f"Set {_A}.{name}={n}.")
        for name, n in least.items()
        if actor[name] is not None and 0 < actor[name] < n
    ]


def tell(cfg: PPOTrainerConfig) -> None:
    """A notice of every changed setting of estimators and losses that nothing reads in this run."""
    actor, algorithm = cfg.actor_rollout_ref.actor, cfg.algorithm
    mode, estimator = actor.policy_loss.loss_mode, algorithm.adv_estimator
    sections = {"": actor, "policy_loss.": actor.policy_loss}
    of_actor = [f"{at}{name}" for at, section in sections.items() for name in changed_names(section)]
    sections = {"": algorithm, "pf_ppo.": algorithm.pf_ppo, "gigpo.": algorithm.gigpo}
    of_algorithm = [f"{at}{name}" for at, section in sections.items() for name in changed_names(section)]
    if not (algorithm.use_pf_ppo or is_dotted(estimator)):
        for key in ("algorithm.pf_ppo.reweight_method", "algorithm.pf_ppo.weight_pow"):
            if key.removeprefix("algorithm.") in of_algorithm:
                notice(key, "has no effect without algorithm.use_pf_ppo=true")
    aggregation = of_loss(cfg).aggregation
    if "loss_agg_mode" in of_actor and aggregation is not None:
        notice(f"{_A}.loss_agg_mode", f"does not change the policy loss {mode!r}, which takes {aggregation}")
    _tell_owned(POLICY_LOSSES, mode, _A, of_actor)
    _tell_owned(ADVANTAGE_ESTIMATORS, estimator, "algorithm", of_algorithm)
    if learns_from_pairs(cfg):
        for name in _ON_RATIOS:
            if name in of_actor:
                notice(f"{_A}.{name}", "has no effect: the loss on pairs has no ratio to clip")
        if "loss_agg_mode" in of_actor and not (actor.use_kl_loss or actor.entropy_coeff):
            notice(f"{_A}.loss_agg_mode", "has no effect: the loss on pairs is a mean over pairs")


def _tell_owned(table: Any, chosen: str, section: str, changed: list[str]) -> None:
    """Settings that only others of the table read; a user's function may read any of its section."""
    readable = () if is_dotted(chosen) else table.facts(chosen).settings
    for name in [] if is_dotted(chosen) else changed:
        owners = table.readers_of(name)
        if owners and name not in readable:
            notice(f"{section}.{name}", f"has no effect without {table.key}={owners[0]}")

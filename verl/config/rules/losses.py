"""Rules about estimators and losses: what each needs, which settings do nothing, pairs of answers, the exact KL.

The KL over the full vocabulary (``full``) takes two models' logits on one worker: the reference runs inside the actor's
passes, so it must be colocated with the actor, and neither may cut its vocabulary or its rows over ranks.
"""

from __future__ import annotations

from verl.config.machine.pools import Pools
from verl.config.rules.checks import Problems
from verl.config.rules.rule import value_at
from verl.config.rules.shared_rows import sequence_ranks
from verl.config.rules.validate_megatron import roles
from verl.config.schema.bounds import in_range
from verl.config.schema.engine import FSDPEngineConfig
from verl.config.schema.node import changed_names
from verl.config.schema.root import (
    PPOTrainerConfig,
    corrects_rollout,
    kl_kinds,
    learns_from_pairs,
    of_estimator,
    of_loss,
    uses_reference,
)
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice
from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, is_dotted

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_FREQ = "trainer.ref_update_freq"
_ON_RATIOS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def pair_problems(cfg: PPOTrainerConfig) -> Problems:
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


def pairs_without_effect(cfg: PPOTrainerConfig, changed: set[str]) -> dict[str, str]:
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


_AR = "actor_rollout_ref"
_INSTEAD = "Or take low_var_kl, an estimate of the same KL from the sampled tokens."


def exact_kl_problems(cfg: PPOTrainerConfig) -> Problems:
    """What stands in the way of an exact KL, one problem for each setting; none where no KL is ``full``."""
    keys = [key for key, kind in kl_kinds(cfg).items() if kind == "full"]
    if not keys:
        return []
    problems = [*_layout(cfg, keys[0]), *_placement(cfg, keys[0])]
    bypass = "algorithm.rollout_correction.bypass_mode"
    if "algorithm.kl_penalty" in keys and cfg.algorithm.rollout_correction.bypass_mode:
        why = "the bypass mode has of the old policy only what the sampler tells of the sampled tokens"
        problems.append(ConfigError(why, key="algorithm.kl_penalty", got="full", fix=f"Set {bypass}=false. {_INSTEAD}"))
    return problems


def _layout(cfg: PPOTrainerConfig, key: str) -> Problems:
    policy, problems = cfg.actor_rollout_ref, []
    if policy.model.use_fused_kernels:
        problems.append(_refused(key, "the fused head never has the logits", f"{_AR}.model.use_fused_kernels=false"))
    roles = {
        "actor": (policy.actor.strategy, policy.actor.fsdp_config),
        "ref": (policy.ref.strategy, policy.ref.fsdp_config),
    }
    for role, (strategy, engine) in roles.items():
        if strategy == "megatron":
            why = "Megatron-Core's engine shards the vocabulary over its ranks"
            problems.append(_refused(key, why, f"{_AR}.{role}.strategy=fsdp2"))
        elif strategy == "torchtitan":
            why = "it was not tried on TorchTitan's models"
            problems.append(_refused(key, why, f"{_AR}.{role}.strategy=fsdp2"))
        else:
            problems += _shared_rows(key, f"{_AR}.{role}.fsdp_config", engine)
    return problems


def _shared_rows(key: str, section: str, engine: FSDPEngineConfig) -> Problems:
    name = "ulysses_sequence_parallel_size"
    return [_refused(key, "several ranks share a row", f"{section}.{name}=1")] if engine[name] > 1 else []


def _placement(cfg: PPOTrainerConfig, key: str) -> Problems:
    pools = Pools.of(cfg)
    actor, ref = pools.of_role("actor"), pools.of_role("ref")
    if actor == ref:
        return []
    why = f"the reference policy lives apart from the actor, in the pool {ref.name!r}"
    return [_refused(key, why, "trainer.resource_pools without ref")]


def _refused(key: str, why: str, instead: str) -> ConfigError:
    return NotBuiltError(
        f"the exact KL needs the logits of both models on one worker, and {why}",
        key=key,
        got="full",
        fix=f"Set {instead}. {_INSTEAD}",
    )


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What an estimator or a loss needs and does not have."""
    return [*_loss(cfg), *_estimator(cfg), *pair_problems(cfg)]


def _loss(cfg: PPOTrainerConfig) -> Problems:
    actor = cfg.actor_rollout_ref.actor
    loss, problems = actor.policy_loss, []
    for name in of_loss(cfg).required:
        if value_at(actor, name) is None:
            message = f"the policy loss {loss.loss_mode!r} has no default for it"
            problems.append(ConfigError(message, key=f"{_A}.{name}", got=None, fix="Set it."))
    return problems


def _estimator(cfg: PPOTrainerConfig) -> Problems:
    algorithm, problems = cfg.algorithm, []
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    listed = of_estimator(cfg).rewards
    if listed is not None and not algorithm[listed]:
        message = f"the estimator {algorithm.adv_estimator!r} normalises several rewards apart"
        fix = "List the keys that the scorer returns."
        problems.append(ConfigError(message, key=f"algorithm.{listed}", got=algorithm[listed], fix=fix))
    if keys and weights is not None and len(weights) != len(keys):
        key = "algorithm.gdpo_reward_weights"
        problems.append(ConfigError(f"{len(keys)} rewards have {len(weights)} weights", key=key, got=weights))
    return problems


def tell(cfg: PPOTrainerConfig) -> None:
    """A notice of every changed setting that nothing reads in this run."""
    actor, algorithm = cfg.actor_rollout_ref.actor, cfg.algorithm
    sections = {
        _A: actor,
        f"{_A}.policy_loss": actor.policy_loss,
        "algorithm": algorithm,
        "algorithm.pf_ppo": algorithm.pf_ppo,
    }
    changed = {f"{key}.{name}" for key, section in sections.items() for name in changed_names(section)}
    for key, why in without_effect(cfg, changed).items():
        notice(key, why)


def without_effect(cfg: PPOTrainerConfig, changed: set[str]) -> dict[str, str]:
    """Changed settings that nothing reads in this run, each with what would give it effect."""
    mode, estimator = cfg.actor_rollout_ref.actor.policy_loss.loss_mode, cfg.algorithm.adv_estimator
    idle = pairs_without_effect(cfg, changed)
    for loss, table, section in ((mode, POLICY_LOSSES, _A), (estimator, ADVANTAGE_ESTIMATORS, "algorithm")):
        if is_dotted(loss):
            continue  # a function of the person's own may read any setting of the section that it is given
        readable = table.facts(loss).settings
        for name in (key.removeprefix(f"{section}.") for key in changed if key.startswith(f"{section}.")):
            owners = table.readers_of(name)
            if owners and name not in readable:
                idle[f"{section}.{name}"] = f"has no effect without {table.key}={owners[0]}"
    aggregation = of_loss(cfg).aggregation
    if f"{_A}.loss_agg_mode" in changed and aggregation is not None:
        idle[f"{_A}.loss_agg_mode"] = f"does not change the policy loss {mode!r}, which takes {aggregation}"
    if not (cfg.algorithm.use_pf_ppo or is_dotted(estimator)):
        for key in ("algorithm.pf_ppo.reweight_method", "algorithm.pf_ppo.weight_pow"):
            if key in changed:
                idle[key] = "has no effect without algorithm.use_pf_ppo=true"
    return idle

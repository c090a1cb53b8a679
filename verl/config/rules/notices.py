"""Settings that a run accepts although they change nothing there: one notice each, with what would give them effect."""

from __future__ import annotations

from typing import Any

from verl.config.loading import recipes
from verl.config.machine import pools
from verl.config.rules import (
    elastic,
    losses,
    off_policy,
    oversampling,
    partial_rollouts,
    queues,
    replayed_experts,
    sampled_log_probs,
    validate_megatron,
    validate_torchtitan,
)
from verl.config.schema.node import ConfigNode, changed_names, was_typed
from verl.config.schema.root import (
    PPOTrainerConfig,
    learns_from_pairs,
    of_estimator,
    skips_old_log_prob,
    uses_critic,
    uses_reference,
)
from verl.config.schema.sft import SFTTrainerConfig
from verl.metrics import notice
from verl.registry import is_dotted

_A, _R, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_NO_KL = "has no effect without algorithm.use_kl_in_reward=true"


def tell(cfg: PPOTrainerConfig) -> None:
    """Every notice of an RL configuration."""
    for part in (
        _kl,
        _clip,
        _decay,
        _automatic_micro_batches,
        _skipped_pass,
        _estimator,
        _settings_of_losses,
        _correction,
        sampled_log_probs.tell,
        replayed_experts.tell,
        _critic,
        _merging,
        _prompt_filter,
        _replay,
        _validation,
        _reward,
        oversampling.tell,
        off_policy.tell,
        partial_rollouts.tell,
        pools.tell,
        queues.tell,
        elastic.tell,
        _conversations,
        _traces,
        _resume,
        validate_megatron.tell,
        validate_torchtitan.tell,
    ):
        part(cfg)
    for recipe in recipes.of_run(cfg):
        recipe.tell(cfg)


def tell_sft(cfg: SFTTrainerConfig) -> None:
    """Every notice of a supervised configuration."""
    _resume(cfg)
    validate_megatron.tell_supervised(cfg)
    validate_torchtitan.tell_supervised(cfg)
    if cfg.model.lora.merge:
        notice("model.lora.merge", "has no effect: there is no sampler")
    if not cfg.data.val_files:
        notice("data.val_files", "no validation files are given, so nothing is validated")
    if cfg.data.use_dynamic_bsz and "micro_batch_size_per_gpu" in changed_names(cfg.data):
        notice("data.micro_batch_size_per_gpu", "has no effect without data.use_dynamic_bsz=false")


def _conversations(cfg: PPOTrainerConfig) -> None:
    rollout = cfg.actor_rollout_ref.rollout
    turns, loop = rollout.multi_turn, rollout.agent.default_agent_loop
    changed = sorted(set(changed_names(turns)) - {"enable", "num_repeat_rollouts"})
    if changed and not turns.enable and loop == "single_turn_agent":
        others = f"; so has {', '.join(changed[1:])}" if changed[1:] else ""
        text = f"has effect only for rows with agent_name=tool_agent, unless {_R}.multi_turn.enable=true"
        notice(f"{_R}.multi_turn.{changed[0]}", text + others)


def _traces(cfg: PPOTrainerConfig) -> None:
    section = cfg.actor_rollout_ref.rollout.trace
    for name in changed_names(section) if section.backend is None else ():
        notice(f"{_R}.trace.{name}", f"has no effect without {_R}.trace.backend")


def _kl(cfg: PPOTrainerConfig) -> None:
    algorithm, actor = cfg.algorithm, cfg.actor_rollout_ref.actor
    changed = changed_names(algorithm.kl_ctrl)
    for name in changed:
        key = f"algorithm.kl_ctrl.{name}"
        if not algorithm.use_kl_in_reward:
            hint = f" ({_A}.kl_loss_coef weighs the KL in the loss)" if actor.use_kl_loss else ""
            notice(key, f"{_NO_KL}{hint}")
        elif name in ("target_kl", "horizon") and algorithm.kl_ctrl.type != "adaptive":
            notice(key, "has no effect without algorithm.kl_ctrl.type=adaptive")
    if not algorithm.use_kl_in_reward and "kl_penalty" in changed_names(algorithm):
        notice("algorithm.kl_penalty", _NO_KL)
    for name in ("kl_loss_coef", "kl_loss_type"):
        if not actor.use_kl_loss and name in changed_names(actor):
            notice(f"{_A}.{name}", f"has no effect without {_A}.use_kl_loss=true")
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        notice(
            "algorithm.use_kl_in_reward", f"the KL to the reference is charged twice: {_A}.use_kl_loss is on as well"
        )


def _clip(cfg: PPOTrainerConfig) -> None:
    actor = cfg.actor_rollout_ref.actor
    if None not in (actor.clip_ratio_low, actor.clip_ratio_high) and "clip_ratio" in changed_names(actor):
        notice(f"{_A}.clip_ratio", "has no effect, since clip_ratio_low and clip_ratio_high are both set")
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        notice(f"{_A}.loss_scale_factor", f"has no effect without {_A}.loss_agg_mode=seq-mean-token-sum-norm")


def _decay(cfg: PPOTrainerConfig) -> None:
    sections = {f"{_A}.optim": cfg.actor_rollout_ref.actor.optim}
    for key, optim in (sections | ({"critic.optim": cfg.critic.optim} if uses_critic(cfg) else {})).items():
        changed, style = changed_names(optim), optim.lr_decay_style
        needed = {
            "min_lr": style != "constant",
            "lr_decay_steps": style != "constant",
            "lr_wsd_decay_style": style == "WSD",
            "lr_wsd_decay_steps": style == "WSD",
        }
        for name in [name for name, holds in needed.items() if not holds and name in changed]:
            styles = "WSD" if "wsd" in name else "linear, cosine, inverse_square_root or WSD"
            notice(f"{key}.{name}", f"has no effect without {key}.lr_decay_style={styles}")
        if optim.lr_scheduler_type != "constant" and "lr_warmup_init" in changed:
            notice(f"{key}.lr_warmup_init", f"has no effect with {key}.lr_scheduler_type={optim.lr_scheduler_type}")


def _automatic_micro_batches(cfg: PPOTrainerConfig) -> None:
    a = cfg.actor_rollout_ref
    passes: list[tuple[str, ConfigNode, bool, str]] = [
        (f"{_A}.ppo_micro_batch_size_per_gpu", a.actor, a.actor.use_dynamic_bsz, "ppo_micro_batch_size")
    ]
    if not skips_old_log_prob(cfg):
        key = f"{_R}.log_prob_micro_batch_size_per_gpu"
        passes.append((key, a.rollout, a.rollout.log_prob_use_dynamic_bsz, "log_prob_micro_batch_size"))
    if uses_reference(cfg):
        key = f"{_REF}.log_prob_micro_batch_size_per_gpu"
        passes.append((key, a.ref, a.ref.log_prob_use_dynamic_bsz, "log_prob_micro_batch_size"))
    if uses_critic(cfg):
        key = "critic.ppo_micro_batch_size_per_gpu"
        passes.append((key, cfg.critic, cfg.critic.use_dynamic_bsz, "ppo_micro_batch_size"))
    open_ = [
        key
        for key, node, dynamic, name in passes
        if not dynamic and node[name] is None and node[f"{name}_per_gpu"] is None
    ]
    if open_:
        also = f" (nor {', '.join(open_[1:])})" if open_[1:] else ""
        notice(
            open_[0],
            f"not set{also}: micro-batches get an automatic token budget, on which no result depends",
        )


def _skipped_pass(cfg: PPOTrainerConfig) -> None:
    rollout = cfg.actor_rollout_ref.rollout
    names = [n for n in ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu") if rollout[n] is not None]
    if names and skips_old_log_prob(cfg):
        why = "one mini-batch and one epoch leave old log-probs unused, so that pass is skipped (trainer.skip_old_log_prob)"
        if cfg.algorithm.rollout_correction.bypass_mode:
            why = "the bypass mode takes the sampler's log-probs"
        elif cfg.actor_rollout_ref.actor.use_rollout_log_probs:
            why = f"{_A}.use_rollout_log_probs takes the sampler's log-probs"
        elif learns_from_pairs(cfg):
            why = "the loss on pairs reads no old log-probs"
        notice(f"{_R}.{names[0]}", f"has no effect: {why}")


def _estimator(cfg: PPOTrainerConfig) -> None:
    algorithm = cfg.algorithm
    if not algorithm.filter_groups.enable:
        for name in changed_names(algorithm.filter_groups):
            notice(f"algorithm.filter_groups.{name}", "has no effect without algorithm.filter_groups.enable=true")
    elif cfg.actor_rollout_ref.rollout.n < 2:
        notice("algorithm.filter_groups.enable", f"drops nothing with {_R}.n=1: a single sample is always kept")


def _correction(cfg: PPOTrainerConfig) -> None:
    algorithm, newer, key = cfg.algorithm, cfg.algorithm.rollout_correction, "algorithm.rollout_correction"
    if algorithm.rollout_is_threshold is None:
        older = [name for name in changed_names(algorithm) if name.startswith("rollout_is")]
        if older:
            notice(f"algorithm.{older[0]}", "has no effect without algorithm.rollout_is_threshold, e.g. 2.0")
    if newer.bypass_mode and newer.loss_type == "ppo_clip" and newer.rollout_is is not None:
        notice(
            f"{key}.rollout_is", f"weights are measured but not applied: the clip of {key}.loss_type=ppo_clip corrects"
        )
    if not newer.bypass_mode and newer.loss_type != "ppo_clip":
        notice(f"{key}.loss_type", f"has no effect without {key}.bypass_mode=true")
    if newer.rollout_is is None and newer.rollout_is_batch_normalize:
        notice(f"{key}.rollout_is_batch_normalize", f"has no effect without {key}.rollout_is")
    elif newer.bypass_mode and newer.rollout_is_batch_normalize and newer.loss_type == "ppo_clip":
        notice(f"{key}.rollout_is_batch_normalize", f"has no effect: {key}.loss_type=ppo_clip applies no weights")
    if newer.rollout_rs is None and newer.rollout_rs_threshold is not None:
        notice(f"{key}.rollout_rs_threshold", f"has no effect without {key}.rollout_rs")


def _settings_of_losses(cfg: PPOTrainerConfig) -> None:
    actor, algorithm = cfg.actor_rollout_ref.actor, cfg.algorithm
    sections = {
        _A: actor,
        f"{_A}.policy_loss": actor.policy_loss,
        "algorithm": algorithm,
        "algorithm.pf_ppo": algorithm.pf_ppo,
    }
    changed = {f"{key}.{name}" for key, section in sections.items() for name in changed_names(section)}
    for key, why in losses.without_effect(cfg, changed).items():
        notice(key, why)


def _critic(cfg: PPOTrainerConfig) -> None:
    estimator = cfg.algorithm.adv_estimator
    if uses_critic(cfg):
        if not of_estimator(cfg).values and not is_dotted(estimator):
            notice("critic.enable", f"a critic is trained, but the estimator {estimator!r} does not use its values")
        return
    changed = [f"critic.{n}" for n in changed_names(cfg.critic) if n in ("cliprange_value", "grad_clip", "enable")]
    changed += [f"critic.optim.{n}" for n in changed_names(cfg.critic.optim) if n != "lr"]
    if cfg.critic.optim.lr != type(cfg.critic)().optim.lr:
        changed.append("critic.optim.lr")
    if cfg.critic.model.path != cfg.actor_rollout_ref.model.path:
        changed.append("critic.model.path")
    if changed:
        why = f"since {estimator!r} has no critic" if cfg.critic.enable is None else "since critic.enable is false"
        notice(changed[0], f"has no effect, {why}" + (f"; nor have {', '.join(changed[1:])}" if changed[1:] else ""))
    if cfg.trainer.critic_warmup > 0:
        notice("trainer.critic_warmup", "there is no critic to warm up: the policy just waits for that many steps")


def _merging(cfg: PPOTrainerConfig) -> None:
    policy = cfg.actor_rollout_ref.model
    if policy.lora.merge and not (policy.lora_rank or policy.lora_adapter_path):
        notice("actor_rollout_ref.model.lora.merge", "has no effect without actor_rollout_ref.model.lora_rank")
    if cfg.critic.model.lora.merge:
        notice("critic.model.lora.merge", "has no effect: no sampler takes a critic's weights")


def _replay(cfg: PPOTrainerConfig) -> None:
    replay = cfg.skip.rollout
    if replay.enable and not replay.steps:
        notice("skip.rollout.enable", "has no effect: skip.rollout.steps names no step")
    for name in ("steps", "action", "dump_dir"):
        if replay.enable or not (was_typed(replay, name) if name == "dump_dir" else name in changed_names(replay)):
            continue  # a folder is expanded, so it never looks like its default
        notice(f"skip.rollout.{name}", "has no effect without skip.rollout.enable=true")


def _prompt_filter(cfg: PPOTrainerConfig) -> None:
    if cfg.data.filter_function.path is None and "name" in changed_names(cfg.data.filter_function):
        notice("data.filter_function.name", "has no effect without data.filter_function.path")


def _validation(cfg: PPOTrainerConfig) -> None:
    val = cfg.actor_rollout_ref.rollout.val_kwargs
    if not cfg.data.val_files:
        notice("data.val_files", "no validation files are given, so nothing is validated")
    elif val.n > 1 and not val.do_sample:
        fix = f"set {_R}.val_kwargs.do_sample=true and a temperature"
        notice(f"{_R}.val_kwargs.n", f"greedy validation gives the same response {val.n} times; {fix}")
    if not val.do_sample:
        for name in ("temperature", "top_p", "top_k"):
            if name in changed_names(val):
                notice(f"{_R}.val_kwargs.{name}", f"has no effect without {_R}.val_kwargs.do_sample=true")


def _reward(cfg: PPOTrainerConfig) -> None:
    function, manager = cfg.reward.custom_reward_function, cfg.reward.reward_manager
    if function.path is None:
        for name in changed_names(function):
            key = f"reward.custom_reward_function.{name}"
            notice(key, "has no effect without reward.custom_reward_function.path")
    if manager.source == "register" and manager.module.path is not None:
        notice("reward.reward_manager.module.path", "has no effect without reward.reward_manager.source=importlib")
    model = cfg.reward.reward_model
    changed = [] if model.enable else changed_names(model)
    if changed:
        also = f"; nor have {', '.join(changed[1:])}" if changed[1:] else ""
        notice(f"reward.reward_model.{changed[0]}", f"has no effect without reward.reward_model.enable=true{also}")


def _resume(cfg: Any) -> None:
    if not cfg.trainer.default_hdfs_dir and "remote_timeout" in changed_names(cfg.trainer):
        notice("trainer.remote_timeout", "has no effect without trainer.default_hdfs_dir")
    if cfg.trainer.resume_from_path and cfg.trainer.resume_mode != "resume_path":
        notice("trainer.resume_from_path", "has no effect without trainer.resume_mode=resume_path")
    if cfg.trainer.save_freq in (-1, 0):
        for name in ("del_local_ckpt_after_load", "esi_redundant_time", "checkpoint_callback_class"):
            if cfg.trainer.get(name):
                notice(f"trainer.{name}", "has no effect without trainer.save_freq")

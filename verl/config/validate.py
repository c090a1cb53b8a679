"""Rules across sections, checked before anything is allocated.

What one setting may be is known where it is declared; here is what settings must be together. A combination that cannot
work is an error with the change that makes it work; one that works but does nothing is a notice.
"""

from __future__ import annotations

from typing import Any

from verl import registry
from verl.config.checks import (
    Problems,
    bad_model_folder,
    caught,
    collect,
    in_range,
    missing_files,
    missing_tracker,
    one_of,
)
from verl.config.critic import CriticConfig
from verl.config.node import ConfigNode, leaves
from verl.config.root import PPOTrainerConfig
from verl.config.sft import SFTTrainerConfig
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

GROUP_ESTIMATORS = (
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo", "gpg", "gdpo",
    "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")


def validate(cfg: PPOTrainerConfig) -> None:
    """All problems of an RL configuration in one `ConfigError`; settings without effect get a notice each."""
    collect((_names, _trackers, _hardware, _files, _groups, _batches, _micro_batches, _sampling, _ranges, _resume), cfg)
    _notices(cfg)


def validate_sft(cfg: SFTTrainerConfig) -> None:
    """The same for a supervised run."""
    collect((_trackers, _sft_hardware, _sft_files, _sft_ranges, _resume), cfg)
    if not cfg.data.val_files:
        notice("data.val_files", "no validation files are given, so nothing is validated")


def uses_critic(cfg: PPOTrainerConfig) -> bool:
    """``critic.enable`` where set, else the estimator decides."""
    return cfg.critic.enable if cfg.critic.enable is not None else cfg.algorithm.adv_estimator == "gae"


# ---- errors ----------------------------------------------------------------------------------------------------------


def _names(cfg: PPOTrainerConfig) -> Problems:
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    found = caught(registry.ADVANTAGE_ESTIMATORS.check, cfg.algorithm.adv_estimator)
    found += caught(registry.POLICY_LOSSES.check, actor.policy_loss.loss_mode)
    found += caught(registry.SAMPLERS.check, rollout.name)
    found += caught(registry.AGENT_LOOPS.check, rollout.agent.default_agent_loop)
    if cfg.reward.reward_manager.source == "register":
        found += caught(registry.REWARD_MANAGERS.check, cfg.reward.reward_manager.name)
    for section in (actor, cfg.actor_rollout_ref.ref, cfg.critic):
        if section.strategy != "auto":
            found += caught(registry.ENGINES.check, section.strategy)
    found += one_of("actor_rollout_ref.actor.loss_agg_mode", actor.loss_agg_mode, LOSS_AGG_MODES)
    found += one_of("critic.loss_agg_mode", cfg.critic.loss_agg_mode, LOSS_AGG_MODES)
    found += one_of("actor_rollout_ref.actor.kl_loss_type", actor.kl_loss_type.removesuffix("+"), KL_KINDS)
    found += one_of("algorithm.kl_penalty", cfg.algorithm.kl_penalty.removesuffix("+"), KL_KINDS)
    return found


def _trackers(cfg: Any) -> Problems:
    found: Problems = []
    for name in cfg.trainer.logger:
        found += caught(registry.TRACKERS.check, name) or missing_tracker("trainer.logger", name)
    return found


def _hardware(cfg: PPOTrainerConfig) -> Problems:
    return _devices(cfg.trainer) or _one_process(cfg.trainer, cfg.trainer.runtime)


def _sft_hardware(cfg: SFTTrainerConfig) -> Problems:
    return _devices(cfg.trainer) or _one_process(cfg.trainer, "auto")


def _devices(trainer: Any) -> Problems:
    from verl import device  # torch is loaded only once there is something to validate

    wanted = trainer.n_gpus_per_node
    unknown = caught(device.resolve_device, trainer.device)
    if unknown or wanted is None:
        return unknown
    kind = device.resolve_device(trainer.device)
    there = device.device_count(kind)
    if kind == "cpu" or wanted <= there:
        return in_range("trainer.n_gpus_per_node", wanted, "1 or more", wanted >= 1)
    return [
        ConfigError(
            f"this machine has {there} {kind} device(s)",
            key="trainer.n_gpus_per_node",
            got=wanted,
            allowed=f"1 to {there}",
            fix="Lower it, or leave it out to use what there is.",
        )
    ]


def _one_process(trainer: Any, runtime: str) -> Problems:
    processes = trainer.nnodes * (trainer.n_gpus_per_node or 1)
    if runtime != "ray" and processes == 1:
        return []
    return [
        NotBuiltError(
            "a run of several processes needs the Ray runtime, which is not built yet",
            key="trainer.runtime",
            got=f"{runtime}, {trainer.nnodes} node(s) x {trainer.n_gpus_per_node or 1}",
            fix="Set trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.runtime=local to run in this process.",
        )
    ]


def _files(cfg: PPOTrainerConfig) -> Problems:
    hint = ""
    if cfg.data.train_files == _default(cfg, "data.train_files"):
        hint = "Set data.train_files, or make this file with `python -m verl.data.prepare.gsm8k --local_save_dir ...`."
    found = missing_files("data.train_files", cfg.data.train_files, hint)
    found += missing_files("data.val_files", cfg.data.val_files)
    custom = cfg.reward.custom_reward_function.path
    found += missing_files("reward.custom_reward_function.path", custom) if custom else []
    found += bad_model_folder(
        "actor_rollout_ref.model.path", cfg.actor_rollout_ref.model.path, "Set it to a Hugging Face folder or hub name."
    )
    if uses_critic(cfg) and cfg.critic.model.path != cfg.actor_rollout_ref.model.path:
        found += bad_model_folder("critic.model.path", cfg.critic.model.path)
    return found


def _sft_files(cfg: SFTTrainerConfig) -> Problems:
    found = missing_files("data.train_files", cfg.data.train_files) + missing_files(
        "data.val_files", cfg.data.val_files
    )
    return found + bad_model_folder("model.path", cfg.model.path, "Set it to a Hugging Face folder or hub name.")


def _groups(cfg: PPOTrainerConfig) -> Problems:
    if cfg.algorithm.adv_estimator in GROUP_ESTIMATORS and cfg.actor_rollout_ref.rollout.n < 2:
        return [
            ConfigError(
                f"the estimator {cfg.algorithm.adv_estimator!r} compares the samples of one prompt and needs several",
                key="actor_rollout_ref.rollout.n",
                got=cfg.actor_rollout_ref.rollout.n,
                allowed="2 or more",
                fix="Set e.g. actor_rollout_ref.rollout.n=8, or algorithm.adv_estimator=gae for a critic.",
            )
        ]
    return []


def _batches(cfg: PPOTrainerConfig) -> Problems:
    batch = cfg.data.train_batch_size
    found = in_range("data.train_batch_size", batch, "1 or more", batch >= 1)
    gen = cfg.data.gen_batch_size
    if gen is not None and not cfg.algorithm.filter_groups.enable and gen != batch:
        found.append(
            ConfigError(
                f"without group filtering one sampled batch is one training batch of {batch}",
                key="data.gen_batch_size",
                got=gen,
                fix=f"Set data.gen_batch_size={batch}, or algorithm.filter_groups.enable=true.",
            )
        )
    found += _divides(
        "actor_rollout_ref.actor.ppo_mini_batch_size", cfg.actor_rollout_ref.actor.ppo_mini_batch_size, batch
    )
    if uses_critic(cfg):
        found += _divides("critic.ppo_mini_batch_size", cfg.critic.ppo_mini_batch_size, batch)
    return found


def _divides(key: str, mini: int, batch: int) -> Problems:
    if mini >= 1 and batch % mini == 0:
        return []
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    near = sorted(sizes, key=lambda size: abs(size - mini))[:4]
    return [
        ConfigError(
            f"data.train_batch_size={batch} prompts cannot be cut into mini-batches of {mini}",
            key=key,
            got=mini,
            allowed=f"a divisor of {batch}, such as {', '.join(str(size) for size in sorted(near))}",
            fix=f"Set {key}={near[0] if near else 1}.",
        )
    ]


def _micro_batches(cfg: PPOTrainerConfig) -> Problems:
    a, found = cfg.actor_rollout_ref, []
    pairs = [
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size",
            a.actor.ppo_micro_batch_size,
            a.actor.ppo_micro_batch_size_per_gpu,
        ),
        (
            "actor_rollout_ref.ref.log_prob_micro_batch_size",
            a.ref.log_prob_micro_batch_size,
            a.ref.log_prob_micro_batch_size_per_gpu,
        ),
        (
            "actor_rollout_ref.rollout.log_prob_micro_batch_size",
            a.rollout.log_prob_micro_batch_size,
            a.rollout.log_prob_micro_batch_size_per_gpu,
        ),
        ("critic.ppo_micro_batch_size", cfg.critic.ppo_micro_batch_size, cfg.critic.ppo_micro_batch_size_per_gpu),
    ]
    for key, total, per_gpu in pairs:
        if total is not None and per_gpu is not None and total != per_gpu:
            found.append(
                ConfigError(
                    f"{key}={total} and {key}_per_gpu={per_gpu} contradict each other", fix=f"Keep {key}_per_gpu."
                )
            )
        for name, value in ((key, total), (f"{key}_per_gpu", per_gpu)):
            found += in_range(name, value, "1 or more, or null", value is None or value >= 1)
    return found


def _sampling(cfg: PPOTrainerConfig) -> Problems:
    rollout = cfg.actor_rollout_ref.rollout
    key = "actor_rollout_ref.rollout"
    found = in_range(f"{key}.n", rollout.n, "1 or more", rollout.n >= 1)
    found += in_range(f"{key}.top_p", rollout.top_p, "above 0, at most 1", 0 < rollout.top_p <= 1)
    found += in_range(f"{key}.val_kwargs.n", rollout.val_kwargs.n, "1 or more", rollout.val_kwargs.n >= 1)
    found += in_range(
        f"{key}.temperature", rollout.temperature, "above 0: training needs samples", rollout.temperature > 0
    )
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature <= 0:
        found.append(
            ConfigError(
                "sampling at temperature 0 is greedy",
                key=f"{key}.val_kwargs.temperature",
                got=rollout.val_kwargs.temperature,
                fix=f"Set a temperature above 0, or {key}.val_kwargs.do_sample=false.",
            )
        )
    for name, value in (
        ("max_prompt_length", cfg.data.max_prompt_length),
        ("max_response_length", cfg.data.max_response_length),
    ):
        found += in_range(f"data.{name}", value, "1 or more", value >= 1)
    return found


def _ranges(cfg: PPOTrainerConfig) -> Problems:
    actor, algorithm, trainer = cfg.actor_rollout_ref.actor, cfg.algorithm, cfg.trainer
    key = "actor_rollout_ref.actor"
    found = in_range(f"{key}.clip_ratio_c", actor.clip_ratio_c, "above 1", actor.clip_ratio_c > 1)
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        found += in_range(f"{key}.{name}", actor[name], "above 0", actor[name] is None or actor[name] > 0)
    found += in_range(f"{key}.ppo_epochs", actor.ppo_epochs, "1 or more", actor.ppo_epochs >= 1)
    found += in_range(f"{key}.optim.lr", actor.optim.lr, "0 or more", actor.optim.lr >= 0)
    found += in_range(f"{key}.grad_clip", actor.grad_clip, "above 0", actor.grad_clip > 0)
    found += in_range("algorithm.gamma", algorithm.gamma, "0 to 1", 0 <= algorithm.gamma <= 1)
    found += in_range("algorithm.lam", algorithm.lam, "0 to 1", 0 <= algorithm.lam <= 1)
    found += in_range("algorithm.kl_ctrl.horizon", algorithm.kl_ctrl.horizon, "above 0", algorithm.kl_ctrl.horizon > 0)
    found += in_range(
        "algorithm.kl_ctrl.target_kl", algorithm.kl_ctrl.target_kl, "above 0", algorithm.kl_ctrl.target_kl > 0
    )
    found += in_range("trainer.total_epochs", trainer.total_epochs, "1 or more", trainer.total_epochs >= 1)
    steps = trainer.total_training_steps
    return found + in_range("trainer.total_training_steps", steps, "1 or more, or null", steps is None or steps >= 1)


def _sft_ranges(cfg: SFTTrainerConfig) -> Problems:
    found = in_range("data.train_batch_size", cfg.data.train_batch_size, "1 or more", cfg.data.train_batch_size >= 1)
    found += in_range("data.max_length", cfg.data.max_length, "2 or more", cfg.data.max_length >= 2)
    return found + in_range("optim.lr", cfg.optim.lr, "0 or more", cfg.optim.lr >= 0)


def _resume(cfg: Any) -> Problems:
    trainer = cfg.trainer
    if trainer.resume_mode != "resume_path":
        return []
    if trainer.resume_from_path and "global_step_" in trainer.resume_from_path:
        return []
    return [
        ConfigError(
            "resume_mode=resume_path needs the folder of a step",
            key="trainer.resume_from_path",
            got=trainer.resume_from_path,
            allowed="a path that ends in global_step_<number>",
        )
    ]


# ---- notices ---------------------------------------------------------------------------------------------------------


def _notices(cfg: PPOTrainerConfig) -> None:
    algorithm, actor, rollout = cfg.algorithm, cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    if not cfg.data.val_files:
        notice("data.val_files", "no validation files are given, so nothing is validated")
    if not algorithm.use_kl_in_reward:
        for name in _changed(algorithm.kl_ctrl):
            notice(f"algorithm.kl_ctrl.{name}", "has no effect without algorithm.use_kl_in_reward=true")
    elif algorithm.kl_ctrl.type != "adaptive" and "target_kl" in _changed(algorithm.kl_ctrl):
        notice("algorithm.kl_ctrl.target_kl", "has no effect without algorithm.kl_ctrl.type=adaptive")
    if not actor.use_kl_loss and {"kl_loss_coef", "kl_loss_type"} & set(_changed(actor)):
        notice("actor_rollout_ref.actor.kl_loss_coef", "has no effect without actor_rollout_ref.actor.use_kl_loss=true")
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        notice("algorithm.use_kl_in_reward", "the KL to the reference is in the reward and in the loss, both")
    if actor.ppo_micro_batch_size is None and actor.ppo_micro_batch_size_per_gpu is None and not actor.use_dynamic_bsz:
        notice(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "not set, so micro-batches get an automatic token budget (numbers do not depend on it)",
        )
    if cfg.critic.enable and algorithm.adv_estimator in GROUP_ESTIMATORS:
        notice("critic.enable", f"the critic is trained, but {algorithm.adv_estimator!r} does not use its values")
    if not uses_critic(cfg) and _changed_critic(cfg.critic):
        names = ", ".join(_changed_critic(cfg.critic)[:3])
        notice("critic", f"{names}: no effect, since {algorithm.adv_estimator!r} has no critic")
    if rollout.val_kwargs.n > 1 and not rollout.val_kwargs.do_sample:
        notice(
            "actor_rollout_ref.rollout.val_kwargs.n",
            "greedy validation gives the same response n times; set do_sample=true",
        )


def _changed(node: ConfigNode) -> list[str]:
    """Leaves of a section that differ from their default."""
    found = []
    for key, _ in leaves(type(node)):
        if "." not in key and node[key] != _field_default(type(node), key):
            found.append(key)
    return found


def _changed_critic(critic: CriticConfig) -> list[str]:
    own = ("cliprange_value", "grad_clip", "data_loader_seed")
    return [f"critic.{name}" for name in _changed(critic) if name in own] + [
        f"critic.optim.{name}" for name in _changed(critic.optim) if name != "lr" or critic.optim.lr != 1e-5
    ]


def _field_default(cls: type[ConfigNode], name: str) -> Any:
    field = cls.__dataclass_fields__[name]
    return field.default if callable(field.default_factory) is False else field.default_factory()


def _default(cfg: ConfigNode, key: str) -> Any:
    node: Any = type(cfg)()
    for part in key.split("."):
        node = node[part]
    return node

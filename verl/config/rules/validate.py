"""Rules between settings, checked before anything is allocated.

What one setting may be is said where it is declared and in `ranges`, what this machine has in `machine`; here is what
settings must be together. A combination that cannot work is an error with the change that makes it work; one that works
but does nothing is a notice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl import registry
from verl.config.loading import recipes
from verl.config.machine import host, kernels, model_fits, sampler_sizes, topology, vision, vllm_fits
from verl.config.machine.pools import Pools
from verl.config.rules import (
    correcting,
    elastic,
    exact_kl,
    losses,
    notices,
    off_policy,
    optimizers,
    oversampling,
    partial_rollouts,
    quantized_rollouts,
    queues,
    ranges,
    replayed_experts,
    reward_model,
    shared_rows,
    validate_megatron,
    validate_profiler,
    validate_torchtitan,
)
from verl.config.rules.checks import Problems, Rule, collect, known_name, missing_folder, one_of
from verl.config.schema.node import unrecorded
from verl.config.schema.preference import DPOTrainerConfig, RMTrainerConfig
from verl.config.schema.root import PPOTrainerConfig, of_estimator, uses_critic
from verl.config.schema.sft import SFTTrainerConfig
from verl.errors import ConfigError

LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ONE_DEVICE = "Leave it out (auto) to train on one device."


def validate(cfg: PPOTrainerConfig, served: bool = False) -> None:
    """All problems of an RL configuration in one `ConfigError`; settings without effect get a notice each.

    Args:
        served: the program samples by servers that it starts, and has no workers.
    """
    here = (
        host.trackers,
        host.traces,
        host.nsys,
        host.rollout_engine,
        host.hardware,
        host.files,
        kernels.problems,
        reward_model.files,
        _resume_folder,
    )
    with unrecorded():
        collect((*here, *_rules(served)), cfg)
        notices.tell(cfg)


def check_printed(program: str, cfg: Any) -> None:
    """What refuses a run wherever it is started, for a configuration that is only printed: names, numbers, relations.

    Raises:
        ConfigError: as `validate` does, without what only this machine, or torchrun, decides.
    """
    rules: dict[str, tuple[Rule, ...]] = {
        "ppo_trainer": _rules(served=False),
        "sft_trainer": (*_SUPERVISED, ranges.sft_numbers, _two_columns),
        "dpo_trainer": (*_SUPERVISED, ranges.sft_numbers, ranges.pair_numbers),
        "rm_trainer": (*_SUPERVISED, ranges.sft_numbers, ranges.pair_numbers),
    }
    with unrecorded():
        collect(rules.get(program, ()), cfg)


def _rules(served: bool) -> tuple[Rule, ...]:
    """What no machine changes."""
    placed = (sampler_sizes.served_problems,) if served else (topology.problems,)
    return (_names, _kl, ranges.numbers, optimizers.problems, losses.problems, _groups, _values, _batches, *placed, _micro_batches,
            _sampling, _mirrors, shared_rows.problems, model_fits.problems, vllm_fits.problems, vision.policy_problems, quantized_rollouts.problems, reward_model.reward_model, oversampling.problems, partial_rollouts.problems, recipes.problems, validate_megatron.problems, validate_torchtitan.problems, replayed_experts.problems,
            validate_profiler.problems, correcting.rollout, correcting.groups, off_policy.problems, queues.problems, elastic.problems, _plugins, _resume, _validation)  # fmt: skip


def validate_sft(cfg: SFTTrainerConfig) -> None:
    """The same for a supervised run."""
    rules = (host.trackers, host.sft_hardware, host.sft_files, kernels.sft_problems, ranges.sft_numbers, optimizers.sft_problems, _sft_engine, model_fits.sft_problems, shared_rows.sft_problems, _two_columns,
             _custom_classes, validate_profiler.sft_problems, _resume, _resume_folder)  # fmt: skip
    with unrecorded():
        collect(rules, cfg)
        notices.tell_sft(cfg)


def validate_pairs(cfg: DPOTrainerConfig | RMTrainerConfig) -> None:
    """The same for training on pairs of answers."""
    rules = (host.trackers, host.sft_hardware, host.sft_files, kernels.sft_problems, ranges.sft_numbers, optimizers.sft_problems, _sft_engine, model_fits.sft_problems, shared_rows.pair_problems,
             ranges.pair_numbers, _custom_classes, validate_profiler.sft_problems, _resume, _resume_folder)  # fmt: skip
    with unrecorded():
        collect(rules, cfg)
        notices.tell_sft(cfg)


def _transport(cfg: PPOTrainerConfig) -> Problems:
    """How weights get to the sampler: a known transport, and an engine that is hosted here.

    In a pool of their own SGLang's servers are started by workers, which put what a transport brings into a folder.
    """
    rollout = cfg.actor_rollout_ref.rollout
    engine, key = rollout.checkpoint_engine, f"{_R}.checkpoint_engine.backend"
    if engine.backend == "naive":
        return []
    is_separate = rollout.name == "sglang" and "rollout" in Pools.of(cfg).named
    if rollout.name in ("server", "sglang") and not is_separate:
        fix = f"Leave it out, or set {_R}.name=vllm or hf."
        return [ConfigError("a server takes its weights through a folder", key=key, got=engine.backend, fix=fix)]
    if engine.custom_backend_module:
        return []  # the module registers it where the sampler is made
    return known_name(
        registry.TRANSPORTS, key, engine.backend, f"Leave it out, or take one of these with {_R}.name=hf."
    )


def _names(cfg: PPOTrainerConfig) -> Problems:
    actor, rollout, ref = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.ref
    manager, default = cfg.reward.reward_manager, "Leave it out to take the default."
    loop = rollout.agent.default_agent_loop
    problems = known_name(
        registry.ADVANTAGE_ESTIMATORS, "algorithm.adv_estimator", cfg.algorithm.adv_estimator, "Take one of these."
    )
    problems += known_name(registry.SCHEDULES, "trainer.v1.trainer_mode", cfg.trainer.v1.trainer_mode, "Leave it out.")
    problems += known_name(registry.POLICY_LOSSES, f"{_A}.policy_loss.loss_mode", actor.policy_loss.loss_mode, default)
    problems += known_name(registry.SAMPLERS, f"{_R}.name", rollout.name, f"Set {_R}.name=hf.")
    problems += _transport(cfg)
    if rollout.agent.agent_loop_config_path is None:  # the names in that file are known where it is read
        problems += known_name(registry.AGENT_LOOPS, f"{_R}.agent.default_agent_loop", loop, default)
    problems += known_name(registry.TOOL_PARSERS, f"{_R}.multi_turn.format", rollout.multi_turn.format, default)
    if manager.source == "register":
        problems += known_name(registry.REWARD_MANAGERS, "reward.reward_manager.name", manager.name, default)
    sections = {_A: actor, "actor_rollout_ref.ref": ref} | ({"critic": cfg.critic} if uses_critic(cfg) else {})
    for key, section in sections.items():
        if section.strategy != "auto":
            problems += known_name(registry.ENGINES, f"{key}.strategy", section.strategy, _ONE_DEVICE)
    problems += one_of(f"{_A}.loss_agg_mode", actor.loss_agg_mode, LOSS_AGG_MODES)
    return problems + one_of("critic.loss_agg_mode", cfg.critic.loss_agg_mode, LOSS_AGG_MODES)


def _kl(cfg: PPOTrainerConfig) -> Problems:
    problems: Problems = []
    for key, kind in ((f"{_A}.kl_loss_type", cfg.actor_rollout_ref.actor.kl_loss_type),
                      ("algorithm.kl_penalty", cfg.algorithm.kl_penalty)):  # fmt: skip
        if kind == "full+":
            problems.append(
                ConfigError(
                    "the exact KL has the gradient of the KL as it is", key=key, got=kind, fix="Set it to full."
                )
            )
        else:
            problems += one_of(key, kind.removesuffix("+"), KL_KINDS)
    return problems + exact_kl.problems(cfg)


def _groups(cfg: PPOTrainerConfig) -> Problems:
    estimator, rollout = cfg.algorithm.adv_estimator, cfg.actor_rollout_ref.rollout
    if not of_estimator(cfg).groups:
        return []
    if rollout.n < 2 and cfg.algorithm.singleton == "raw":
        return []
    if rollout.n < 2:
        return [
            ConfigError(
                f"the estimator {estimator!r} compares the samples of one prompt and needs several",
                key=f"{_R}.n",
                got=rollout.n,
                allowed="2 or more",
                fix=f"Set e.g. {_R}.n=8, or algorithm.adv_estimator=gae for a critic.",
            )
        ]
    if not rollout.do_sample:
        message = (
            f"greedy samples of one prompt are all the same, so the estimator {estimator!r} has nothing to compare"
        )
        return [ConfigError(message, key=f"{_R}.do_sample", got=False, fix=f"Set {_R}.do_sample=true.")]
    return []


def _values(cfg: PPOTrainerConfig) -> Problems:
    estimator = cfg.algorithm.adv_estimator
    if not of_estimator(cfg).values or uses_critic(cfg):
        return []
    fix = f"Leave it out, or take an estimator without a critic: algorithm.adv_estimator=grpo {_R}.n=8."
    message = f"the estimator {estimator!r} needs the values of a critic"
    return [ConfigError(message, key="critic.enable", got=False, fix=fix)]


def _batches(cfg: PPOTrainerConfig) -> Problems:
    batch = cfg.data.train_batch_size
    problems = _divides(f"{_A}.ppo_mini_batch_size", cfg.actor_rollout_ref.actor.ppo_mini_batch_size, batch)
    if uses_critic(cfg):
        problems += _divides("critic.ppo_mini_batch_size", cfg.critic.ppo_mini_batch_size, batch)
    return problems


def _divides(key: str, mini: int, batch: int) -> Problems:
    if mini < 1 or batch < 1 or batch % mini == 0:
        return []
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    near = sorted(sizes, key=lambda size: abs(size - mini))[:4]
    return [
        ConfigError(
            f"data.train_batch_size={batch} prompts cannot be cut into mini-batches of {mini}",
            key=key,
            got=mini,
            allowed=f"a divisor of {batch}, such as {', '.join(str(size) for size in sorted(near))}",
            fix=f"Set {key}={near[0]}.",
        )
    ]


def _micro_batches(cfg: PPOTrainerConfig) -> Problems:
    a, ref, critic, problems = cfg.actor_rollout_ref.actor, "actor_rollout_ref.ref", cfg.critic, []
    pairs = [
        (_A, a, "ppo_micro_batch_size"),
        (ref, cfg.actor_rollout_ref.ref, "log_prob_micro_batch_size"),
        (_R, cfg.actor_rollout_ref.rollout, "log_prob_micro_batch_size"),
    ]
    if uses_critic(cfg):
        pairs += [("critic", critic, "ppo_micro_batch_size"), ("critic", critic, "forward_micro_batch_size")]
    for section, node, name in pairs:
        total, per_gpu = node[name], node[f"{name}_per_gpu"]
        if total is not None and per_gpu is not None and total != per_gpu:
            key = f"{section}.{name}_per_gpu"
            message = f"{section}.{name}={total} and {key}={per_gpu} contradict each other"
            problems.append(ConfigError(message, key=key, fix="Keep this one and leave the other out."))
    return problems


def _sampling(cfg: PPOTrainerConfig) -> Problems:
    val, key = cfg.actor_rollout_ref.rollout.val_kwargs, f"{_R}.val_kwargs"
    if not val.do_sample or val.temperature > 0:
        return []
    fix = f"Set it above 0, or {key}.do_sample=false."
    return [ConfigError("sampling at temperature 0 is greedy", key=f"{key}.temperature", got=val.temperature, fix=fix)]


def _mirrors(cfg: PPOTrainerConfig) -> Problems:
    data, rollout, problems = cfg.data, cfg.actor_rollout_ref.rollout, []
    for ours, theirs in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        if rollout[ours] != data[theirs]:
            message = f"it is the same length as data.{theirs}, which is {data[theirs]}"
            fix = f"Set data.{theirs} alone."
            problems.append(ConfigError(message, key=f"{_R}.{ours}", got=rollout[ours], fix=fix))
    for section, node in ((_A, cfg.actor_rollout_ref.actor), ("critic", cfg.critic)):
        if node.rollout_n != rollout.n:
            message = f"it is the same number as {_R}.n, which is {rollout.n}"
            fix = f"Set {_R}.n alone."
            problems.append(ConfigError(message, key=f"{section}.rollout_n", got=node.rollout_n, fix=fix))
    needed = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and 0 < rollout.max_model_len < needed:
        message = f"data.max_prompt_length + data.max_response_length = {needed} tokens do not fit"
        fix = f"Set {_R}.max_model_len={needed} or shorter lengths."
        problems.append(ConfigError(message, key=f"{_R}.max_model_len", got=rollout.max_model_len, fix=fix))
    return problems


def _plugins(cfg: PPOTrainerConfig) -> Problems:
    manager, problems = cfg.reward.reward_manager, _custom_classes(cfg)
    if manager.source == "importlib" and manager.module.path is None:
        key, fix = "reward.reward_manager.module.path", "Name the Python file that holds the reward manager's class."
        problems.append(ConfigError("reward.reward_manager.source=importlib needs a file", key=key, fix=fix))
    named = cfg.trainer.checkpoint_callback_class
    if named and not registry.is_dotted(named):
        key, allowed = "trainer.checkpoint_callback_class", "package.module:MyCallback"
        problems.append(ConfigError("this is no path of a class", key=key, got=named, allowed=allowed))
    return problems


def _custom_classes(cfg: PPOTrainerConfig | SFTTrainerConfig) -> Problems:
    named = [("data.custom_cls.path", "data.custom_cls.name", cfg.data.custom_cls.path, cfg.data.custom_cls.name)]
    if isinstance(cfg, PPOTrainerConfig):
        order = cfg.data.sampler
        named.append(("data.sampler.class_path", "data.sampler.class_name", order.class_path, order.class_name))
    problems: Problems = []
    for path_key, name_key, path, name in named:
        if (path is None) != (name is None):
            present, missing = (name_key, path_key) if path is None else (path_key, name_key)
            fix = f"Set it to the {'file' if path is None else 'class in it'}."
            problems.append(ConfigError(f"{present} alone names no class", key=missing, fix=fix))
    return problems


def _run_names(cfg: PPOTrainerConfig | SFTTrainerConfig) -> Problems:
    """Names become parts of paths: of metrics, recordings and checkpoints."""
    names = {f"trainer.{name}": str(cfg.trainer[name]) for name in ("project_name", "experiment_name")}
    fix = "Folders have settings: trainer.default_local_dir, VERL_FILE_LOGGER_ROOT."
    return [
        ConfigError("a name must not lead out of the folder of its files", key=key, got=name, fix=fix)
        for key, name in names.items()
        if name.startswith(("/", "~")) or ".." in Path(name).parts or "\0" in name
    ]


def _resume(cfg: PPOTrainerConfig | SFTTrainerConfig) -> Problems:
    trainer, key = cfg.trainer, "trainer.resume_from_path"
    problems = _run_names(cfg)
    if "://" in trainer.default_local_dir:
        folder = "trainer.default_local_dir"
        fix = f"Leave it out, or name a local folder, and set trainer.default_hdfs_dir={trainer.default_local_dir}."
        message = "checkpoints are written to this machine, and from there copied to a remote folder"
        problems.append(ConfigError(message, key=folder, got=trainer.default_local_dir, fix=fix))
    if trainer.resume_mode != "resume_path":
        return problems
    if not trainer.resume_from_path or "global_step_" not in trainer.resume_from_path:
        problems.append(
            ConfigError(
                "resume_mode=resume_path needs the folder of a step",
                key=key,
                got=trainer.resume_from_path,
                allowed="a path that ends in global_step_<number>",
            )
        )
    return problems


def _resume_folder(cfg: PPOTrainerConfig | SFTTrainerConfig) -> Problems:
    """The folder of a step that this machine does not have; one at a remote place is looked for when the run begins."""
    path = cfg.trainer.resume_from_path if cfg.trainer.resume_mode == "resume_path" else None
    is_step = path is not None and "global_step_" in path and "://" not in path
    return missing_folder("trainer.resume_from_path", str(path)) if is_step else []


def _validation(cfg: PPOTrainerConfig) -> Problems:
    if not cfg.trainer.val_only or cfg.data.val_files:
        return []
    message = "trainer.val_only=true leaves nothing to do without validation files"
    return [ConfigError(message, key="data.val_files", fix="Set data.val_files, or trainer.val_only=false.")]


def _sft_engine(cfg: SFTTrainerConfig) -> Problems:
    strategy = cfg.engine.strategy
    problems = [] if strategy == "auto" else known_name(registry.ENGINES, "engine.strategy", strategy, _ONE_DEVICE)
    return problems or validate_megatron.supervised_problems(cfg) + validate_torchtitan.supervised_problems(cfg)


def _sft_names(cfg: SFTTrainerConfig) -> Problems:
    strategy = cfg.engine.strategy
    names = [] if strategy == "auto" else known_name(registry.ENGINES, "engine.strategy", strategy, _ONE_DEVICE)
    return names + vision.problems("model.path", cfg.model.path, cfg.model.external_lib, strategy)


def _two_columns(cfg: SFTTrainerConfig) -> Problems:
    data = cfg.data
    if (data.prompt_key is None) == (data.response_key is None):
        return []
    missing = "prompt_key" if data.prompt_key is None else "response_key"
    fix = "Set both, or neither to read conversations from data.messages_key."
    return [ConfigError("two-column data needs the names of both columns", key=f"data.{missing}", fix=fix)]


_SUPERVISED: tuple[Rule, ...] = (_sft_names, optimizers.sft_problems, _custom_classes, validate_profiler.sft_problems)

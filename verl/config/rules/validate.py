"""Rules between settings, checked before anything is allocated.

What one setting may be is said where it is declared, what this machine has in `host`; here is what settings must be
together. A combination that cannot work is an error with the change that makes it work; one that works but does nothing
is a notice.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from verl import registry
from verl.config.loading import recipes
from verl.config.machine import host, models, pools, topology
from verl.config.machine.pools import Pools, roles
from verl.config.rules import losses, optimizers, queues, runs, sampling
from verl.config.rules.checks import (
    NOTICE,
    Check,
    Problems,
    Rule,
    Table,
    collect,
    known_name,
    missing_folder,
    out_of_bounds,
    problems_of_rows,
    tell,
    tell_without_effect,
    value_at,
)
from verl.config.schema.actor import ActorConfig, CriticConfig, PolicyLossConfig, RefConfig
from verl.config.schema.algorithm import AlgoConfig, RolloutCorrectionConfig
from verl.config.schema.data import (
    CustomClassConfig,
    DataConfig,
    SamplerClassConfig,
    fault_of_weights,
    fix_of_weights,
)
from verl.config.schema.node import ConfigNode, changed_names, unrecorded
from verl.config.schema.reward import RewardModelConfig
from verl.config.schema.role import OptimizerConfig, RunConfig
from verl.config.schema.rollout import RolloutConfig, SamplingConfig
from verl.config.schema.root import PPOTrainerConfig, uses_critic
from verl.config.schema.tree import BETAS
from verl.errors import ConfigError, suggest

LOAD_FORMATS = ("dummy", "hf", "safetensors", "auto")


def _twice(name: str) -> Rule:
    """Micro-batches by two settings that differ."""
    return Rule(
        f"{name}_per_gpu",
        f"{{at}}.{name}={{{name}}} and {{key}}={{got}} contradict each other",
        lambda node: None not in (node[name], node[f"{name}_per_gpu"]) and node[name] != node[f"{name}_per_gpu"],
        "Keep this one and leave the other out.",
        shows=False,
    )


def class_in_file(path: str, name: str) -> tuple[Rule, ...]:
    """A file and a class in it, of which one alone means nothing."""
    fixes = {path: "Set it to the file.", name: "Set it to the class in it."}
    others = {path: name, name: path}
    return tuple(
        Rule(missing, f"{{at}}.{other} alone names no class", partial(_is_alone, other, missing), fixes[missing])
        for missing, other in others.items()
    )


def _is_alone(present: str, missing: str, section: Any) -> bool:
    return section[present] is not None and section[missing] is None


def _leads_out(name: str) -> bool:
    return name.startswith(("/", "~")) or ".." in Path(name).parts or "\0" in name


def _leaves_folder(name: str) -> Rule:
    """Names become parts of paths: of metrics, recordings and checkpoints."""
    fix = "Folders have settings: trainer.default_local_dir, VERL_FILE_LOGGER_ROOT."
    message = "a name must not lead out of the folder of its files"
    return Rule(name, message, lambda run: _leads_out(str(run[name])), fix)


def keeps_half(name: str) -> Rule:
    """Trained weights in float16; products may be in it."""
    return Rule(
        f"{name}.model_dtype".removeprefix("."),
        "weights that are kept in float16 lose small updates",
        lambda node: value_at(node, name).model_dtype.removeprefix("torch.") in ("fp16", "float16", "half"),
        f"Keep them in fp32, and set {{at}}.{name}{'.' if name else ''}dtype=float16 for products in float16.",
    )


def _of_surplus(name: str) -> Rule:
    """A filter of prompts, where none is sampled in vain."""
    return Rule(
        name,
        "has no effect with {at}.oversample_factor=1: every sampled prompt is trained on",
        lambda data: data.oversample_factor == 1 and data[name],
        kind=NOTICE,
    )


def _other_betas(optim: Any) -> bool:
    arguments = optim.override_optimizer_config or {}
    return "betas" in arguments and not BETAS.holds(arguments["betas"])


def _not_a_step(run: Any) -> bool:
    return run.resume_mode == "resume_path" and "global_step_" not in (run.resume_from_path or "")


def _is_never(every: int | str) -> bool:
    return isinstance(every, int) and every <= 0


def _misses_validations(run: ConfigNode) -> bool:
    every, test = run.save_freq, run.test_freq
    if not run.best_metric or _is_never(every) or _is_never(test):
        return False
    return every % test != 0 if isinstance(every, int) and isinstance(test, int) else every != test


RUN = (
    _leaves_folder("project_name"),
    _leaves_folder("experiment_name"),
    Rule(
        "default_local_dir",
        "checkpoints are written to this machine, and from there copied to a remote folder",
        lambda run: "://" in run.default_local_dir,
        "Leave it out, or name a local folder, and set {at}.default_hdfs_dir={got}.",
    ),
    Rule(
        "resume_from_path",
        "resume_mode=resume_path needs the folder of a step",
        _not_a_step,
        allowed="a path that ends in global_step_<number>",
    ),
    Rule(
        "best_metric",
        "checkpoints are compared by a validation at the same step",
        lambda run: run.best_metric and (_is_never(run.save_freq) or _is_never(run.test_freq)),
        "Set {at}.save_freq and {at}.test_freq.",
    ),
    Rule(
        "best_metric",
        "compares only checkpoints of validated steps: {at}.save_freq={save_freq} is no multiple of "
        "{at}.test_freq={test_freq}",
        _misses_validations,
        kind=NOTICE,
    ),
)
_MUON = ("match_rms_adamw", "original")
_CLIPS = "the clip of {at}.loss_type=ppo_clip corrects"
TABLE: Table = {
    ActorConfig: (
        _twice("ppo_micro_batch_size"),
        Rule("kl_loss_type", "the exact KL has the gradient of the KL as it is", lambda a: a.kl_loss_type == "full+",
             "Set it to full."),
        Rule("clip_ratio", "has no effect, since clip_ratio_low and clip_ratio_high are both set",
             lambda a: None not in (a.clip_ratio_low, a.clip_ratio_high) and "clip_ratio" in changed_names(a),
             kind=NOTICE),
        keeps_half("fsdp_config"),
    ),
    PolicyLossConfig: (
        Rule("clip_cov_lb", "out of range", lambda loss: loss.clip_cov_lb >= loss.clip_cov_ub,
             allowed="below clip_cov_ub={clip_cov_ub}"),
    ),
    RefConfig: (_twice("log_prob_micro_batch_size"),),
    RolloutConfig: (
        *sampling.OF_SAMPLER,
        _twice("log_prob_micro_batch_size"),
        Rule("load_format", "unknown value", lambda r: r.name == "vllm" and r.load_format not in LOAD_FORMATS,
             lambda r: suggest(r.load_format, LOAD_FORMATS), LOAD_FORMATS),
    ),
    CriticConfig: (keeps_half("fsdp"), _twice("ppo_micro_batch_size"), _twice("forward_micro_batch_size")),
    RewardModelConfig: (_twice("micro_batch_size"),),
    SamplingConfig: (
        Rule("temperature", "sampling at temperature 0 is greedy", lambda s: s.do_sample and s.temperature <= 0,
             "Set it above 0, or {at}.do_sample=false."),
    ),
    AlgoConfig: (
        Rule("kl_penalty", "the exact KL has the gradient of the KL as it is", lambda a: a.kl_penalty == "full+",
             "Set it to full."),
    ),
    DataConfig: (
        Rule("accuracy_lower_bound", "out of range", lambda d: not 0 <= d.accuracy_lower_bound <= d.accuracy_upper_bound,
             allowed="0 to accuracy_upper_bound={accuracy_upper_bound}"),
        *map(_of_surplus, ("filter_accuracy", "filter_truncate")),
        Rule("oversample_factor", "no filter is on, so the earliest prompts are trained on and the others dropped",
             lambda d: d.oversample_factor != 1 and not (d.filter_accuracy or d.filter_truncate), kind=NOTICE),
        Rule("source_weights", lambda d: fault_of_weights(d.source_weights),
             lambda d: d.source_weights and fault_of_weights(d.source_weights),
             lambda d: fix_of_weights(d.source_weights)),
        Rule("source_weights", "has an effect only if {at}.sampler.class_name reads it",
             lambda d: d.source_weights and d.sampler.class_path
             and not d.sampler.class_path.startswith("pkg://verl.data."),
             kind=NOTICE),
    ),
    RolloutCorrectionConfig: (
        Rule("rollout_is", f"weights are measured but not applied: {_CLIPS}",
             lambda c: c.bypass_mode and c.loss_type == "ppo_clip" and c.rollout_is is not None, kind=NOTICE),
        Rule("rollout_is_batch_normalize", "has no effect: {at}.loss_type=ppo_clip applies no weights",
             lambda c: c.bypass_mode and c.rollout_is_batch_normalize and c.loss_type == "ppo_clip", kind=NOTICE),
    ),
    OptimizerConfig: (
        Rule("override_optimizer_config.adjust_lr_fn", "unknown value",
             lambda o: o.optimizer == "Muon" and o.optimizer_impl == "torch.optim"
             and (o.override_optimizer_config or {}).get("adjust_lr_fn", _MUON[0]) not in _MUON,
             lambda o: suggest(str(o.override_optimizer_config["adjust_lr_fn"]), _MUON), _MUON),
        Rule("override_optimizer_config.betas", "out of range", _other_betas, allowed=BETAS.allowed),
        Rule("lr_warmup_init", "out of range", lambda o: o.lr_warmup_init > o.lr, allowed="at most {at}.lr={lr}"),
        Rule("min_lr", "out of range", lambda o: o.min_lr > o.lr, allowed="at most {at}.lr={lr}"),
        Rule("lr_decay_style", "{at}.lr_scheduler_type={lr_scheduler_type} and {key}={got} are two schedules",
             lambda o: o.lr_decay_style != "constant" and o.lr_scheduler_type != "constant",
             "Leave one of them out."),
        Rule("lr_wsd_decay_steps", "lr_decay_style=WSD needs the length of its last part",
             lambda o: o.lr_decay_style == "WSD" and o.lr_wsd_decay_steps is None, "Set it to a number of steps."),
        Rule("lr_warmup_init", "has no effect with {at}.lr_scheduler_type={lr_scheduler_type}",
             lambda o: o.lr_scheduler_type != "constant" and "lr_warmup_init" in changed_names(o), kind=NOTICE),
    ),
    CustomClassConfig: class_in_file("path", "name"),
    SamplerClassConfig: class_in_file("class_path", "class_name"),
    RunConfig: RUN,
    PPOTrainerConfig: (*runs.ROWS, *losses.ROWS, *sampling.ROWS),
}  # fmt: skip
"""Class of a section, or of the program, -> its rows."""


_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ONE_DEVICE = "Leave it out (auto) to train on one device."
ALWAYS: tuple[Check, ...] = (out_of_bounds, problems_of_rows(TABLE))


def validate(cfg: PPOTrainerConfig, served: bool = False) -> None:
    """All problems of an RL configuration in one `ConfigError`; settings without effect get a notice each.

    Args:
        served: the program samples by servers that it starts, and has no workers.
    """
    here = (
        host.trackers,
        host.traces,
        host.rollout_engine,
        host.hardware,
        host.files,
        host.kernel_problems,
        resume_folder,
    )
    with unrecorded():
        features = _features(cfg)
        here += tuple(feature.lacking for feature in features if hasattr(feature, "lacking"))
        collect((*here, *_rules(cfg, served)), cfg)
        _tell(cfg, features)


def _features(cfg: PPOTrainerConfig) -> list[Any]:
    """The modules of rules that judge what only some runs have, imported where this one has it.

    Each has ``problems``, and may have ``tell`` (notices) and ``lacking`` (what this machine does not have).
    """
    features: list[Any] = []
    engines = {role.section.strategy for role in roles(cfg)}
    if "megatron" in engines:
        from verl.config.rules import validate_megatron

        features.append(validate_megatron)
    if "torchtitan" in engines:
        from verl.config.rules import validate_torchtitan

        features.append(validate_torchtitan)
    if cfg.distillation.enabled:
        from verl.config.rules import distillation

        features.append(distillation)
    if cfg.reward.reward_model.enable:
        from verl.config.rules import reward_model

        features.append(reward_model)
    policy = cfg.actor_rollout_ref
    profilers = (policy.actor.profiler, policy.ref.profiler, policy.rollout.profiler, cfg.critic.profiler)
    if cfg.global_profiler.steps or any(profiler.enable for profiler in profilers):
        from verl.config.machine import profiling

        features.append(profiling)
    return features


def check_printed(cfg: PPOTrainerConfig) -> None:
    """What refuses a run wherever it is started, for a configuration that is only printed: names, numbers, relations.

    Raises:
        ConfigError: as `validate` does, without what only this machine decides.
    """
    with unrecorded():
        collect(_rules(cfg, served=False), cfg)


def _rules(cfg: PPOTrainerConfig, served: bool) -> tuple[Check, ...]:
    """What no machine changes."""
    placed = (pools.served_problems,) if served else (topology.problems,)
    of_features = (feature.problems for feature in _features(cfg))
    return (_names, *ALWAYS, optimizers.problems, losses.problems, runs.uneven_mini_batches, *placed, runs.row_problems,
            models.problems, models.vllm_problems, models.policy_problems, recipes.problems, sampling.thresholds,
            queues.problems, pools.elastic_problems, *of_features)  # fmt: skip


def _tell(cfg: PPOTrainerConfig, features: list[Any]) -> None:
    """Every notice of an RL configuration."""
    runs.tell(cfg)
    tell(TABLE, cfg)
    tell_without_effect(cfg)
    pools.tell_elastic(cfg)
    for part in (losses, sampling, pools, queues, *features, *recipes.of_run(cfg)):
        if hasattr(part, "tell"):
            part.tell(cfg)


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
    key = "distillation.distillation_loss.policy_loss_mode"
    problems += known_name(registry.POLICY_LOSSES, key, cfg.distillation.distillation_loss.policy_loss_mode, default)
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
            problems += known_name(registry.ENGINES, f"{key}.strategy", section.strategy, ONE_DEVICE)
    return problems


def resume_folder(cfg: ConfigNode) -> Problems:
    """The folder of a step that this machine does not have; one at a remote place is looked for when the run begins."""
    path = cfg.trainer.resume_from_path if cfg.trainer.resume_mode == "resume_path" else None
    is_step = path is not None and "global_step_" in path and "://" not in path
    return missing_folder("trainer.resume_from_path", str(path)) if is_step else []

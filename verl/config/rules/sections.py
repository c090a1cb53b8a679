"""Rows about the settings of one section."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from verl.config.rules import sampling
from verl.config.rules.checks import NOTICE, Rule, Table, value_at
from verl.config.schema.actor import ActorConfig, CriticConfig, PolicyLossConfig, RefConfig
from verl.config.schema.algorithm import AlgoConfig, RolloutCorrectionConfig
from verl.config.schema.data import CustomClassConfig, DataConfig, SamplerClassConfig
from verl.config.schema.node import changed_names
from verl.config.schema.reward import RewardModelConfig
from verl.config.schema.role import OptimizerConfig
from verl.config.schema.rollout import RolloutConfig, SamplingConfig
from verl.config.schema.trainer import TrainerConfig
from verl.config.schema.tree import BETAS
from verl.errors import suggest

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
)
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
    ),
    RolloutCorrectionConfig: (
        Rule("rollout_is", f"weights are measured but not applied: {_CLIPS}",
             lambda c: c.bypass_mode and c.loss_type == "ppo_clip" and c.rollout_is is not None, kind=NOTICE),
        Rule("rollout_is_batch_normalize", "has no effect: {at}.loss_type=ppo_clip applies no weights",
             lambda c: c.bypass_mode and c.rollout_is_batch_normalize and c.loss_type == "ppo_clip", kind=NOTICE),
    ),
    OptimizerConfig: (
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
    TrainerConfig: RUN,
}  # fmt: skip
"""Class of a section -> its rows."""

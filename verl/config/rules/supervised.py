"""Rules of the programs without reinforcement learning: supervised runs, pairs of answers, generation, evaluation."""

from __future__ import annotations

from verl import registry
from verl.config.machine import host, models, pools, profiling
from verl.config.machine.pools import role_of_supervised
from verl.config.rules import optimizers, runs, validate, validate_megatron, validate_torchtitan
from verl.config.rules.checks import (
    NOTICE,
    Check,
    Problems,
    Rule,
    Table,
    bad_model_folder,
    collect,
    known_name,
    missing_files,
    missing_folder,
    out_of_bounds,
    problems_of_rows,
    set_names,
    tell,
    tell_names,
    tell_without_effect,
)
from verl.config.rules.validate import ONE_DEVICE, resume_folder
from verl.config.schema.generation import EvaluationConfig, GenerationConfig
from verl.config.schema.node import changed_names, unrecorded
from verl.config.schema.role import LIKE_ENGINE
from verl.config.schema.sft import (
    WITHOUT_REFERENCE,
    DPOConfig,
    DPOTrainerConfig,
    SFTCustomClassConfig,
    SFTEngineConfig,
    SFTTrainerConfig,
    SupervisedConfig,
)
from verl.config.schema.torchtitan import TITAN_LIKE_ENGINE
from verl.errors import ConfigError, NotBuiltError
from verl.registry import SAMPLERS


def _no_reference(dpo: DPOConfig) -> bool:
    loads = bool(dpo.ref_model_path) or dpo.precompute_ref_log_probs
    return loads and (dpo.reference_free or dpo.loss_type in WITHOUT_REFERENCE)


def _one_column(cfg: SupervisedConfig) -> bool:
    data = cfg.data
    return "chosen_key" not in data and (data.prompt_key is None) != (data.response_key is None)


def _not_with_kto(name: str) -> Rule:
    """A setting of losses on pairs."""
    return Rule(
        name, "KTO does without it", lambda d: d.loss_type == "kto" and d[name] not in (None, False), "Leave it out."
    )


def _of_other_rows(name: str) -> Rule:
    """A column of the form of rows that the loss does not read."""
    is_unpaired = name in ("completion_key", "label_key")
    return Rule(
        f"data.{name}",
        "has no effect without dpo.loss_type=kto" if is_unpaired else "has no effect with dpo.loss_type=kto",
        lambda c: (c.dpo.loss_type == "kto") != is_unpaired and name in changed_names(c.data),
        kind=NOTICE,
    )


def _spread_logits(cfg: SFTTrainerConfig) -> str:
    """The setting that keeps the student's logits of a row from being in one place; empty where nothing does."""
    engine = cfg.engine
    if cfg.model.use_fused_kernels:
        return "model.use_fused_kernels"
    if engine.strategy in ("megatron", "torchtitan"):
        return "engine.strategy"
    return "engine.ulysses_sequence_parallel_size" if engine.ulysses_sequence_parallel_size > 1 else ""


_TEACHERS = "distillation.teacher_models"
_TWO = "two-column data needs the names of both columns"
_BOTH = "Set both, or neither to read conversations from data.messages_key."
_REFERENCE = "there is no reference policy to load"
_NO_REFERENCE = "Leave out dpo.ref_model_path and dpo.precompute_ref_log_probs."

TABLE: Table = {
    **validate.TABLE,
    SFTEngineConfig: (validate.keeps_half(""),),
    SFTCustomClassConfig: validate.class_in_file("path", "name"),
    DPOConfig: (
        Rule("label_smoothing", "only sigmoid and cpo have it",
             lambda d: d.label_smoothing and (d.loss_type not in ("sigmoid", "cpo") or d.loss_fn),
             "Leave it out, or set dpo.loss_type=sigmoid without dpo.loss_fn."),
        Rule("simpo_gamma", "only the loss of SimPO has it",
             lambda d: d.simpo_gamma != DPOConfig().simpo_gamma and d.loss_type != "simpo",
             "Leave it out, or set dpo.loss_type=simpo."),
        *map(_not_with_kto, ("loss_fn", "reference_free", "precompute_ref_log_probs", "length_normalised", "sft_coef")),
        Rule("loss_fn", "it takes the place of dpo.loss_type={loss_type}",
             lambda d: d.loss_fn and d.loss_type != "sigmoid", "Leave one of them out."),
        Rule("loss_fn", "not the path of a function", lambda d: d.loss_fn and ":" not in d.loss_fn,
             allowed="my_pkg.my_mod:my_loss, or path/to/file.py:my_loss"),
        Rule("loss_type", _REFERENCE, lambda d: _no_reference(d) and d.loss_type in WITHOUT_REFERENCE, _NO_REFERENCE),
        Rule("reference_free", _REFERENCE, lambda d: _no_reference(d) and d.loss_type not in WITHOUT_REFERENCE,
             _NO_REFERENCE),
    ),
    DPOTrainerConfig: (
        *map(_of_other_rows, ("completion_key", "label_key", "chosen_key", "rejected_key", "margin_key")),
        Rule("data.train_batch_size", "KTO takes its reference point from mismatched rows of a batch, and one row has none",
             lambda c: c.dpo.loss_type == "kto" and c.data.train_batch_size < 2, allowed="2 or more"),
    ),
    SupervisedConfig: (
        Rule("data.prompt_key", _TWO, lambda c: _one_column(c) and c.data.prompt_key is None, _BOTH),
        Rule("data.response_key", _TWO, lambda c: _one_column(c) and c.data.response_key is None, _BOTH),
        Rule("model.lora.merge", "has no effect: there is no sampler", lambda c: c.model.lora.merge, kind=NOTICE),
        Rule("data.val_files", "no validation files are given, so nothing is validated",
             lambda c: not c.data.val_files, kind=NOTICE),
        Rule("trainer.best_metric", "checkpoints are compared by validations, and there are no files to validate on",
             lambda c: c.trainer.best_metric and not c.data.val_files, "Set data.val_files."),
        Rule("data.micro_batch_size_per_gpu", "has no effect without data.use_dynamic_bsz=false",
             lambda c: c.data.use_dynamic_bsz and "micro_batch_size_per_gpu" in changed_names(c.data), kind=NOTICE),
    ),
    SFTTrainerConfig: (
        Rule(_TEACHERS, "distillation needs a teacher",
             lambda c: c.distillation.enabled and not c.distillation.teacher_models,
             f"Name one: {_TEACHERS}.teacher.model_path=FOLDER."),
        Rule(_spread_logits, "a teacher compares the logits of a row, which must be in one place",
             lambda c: c.distillation.enabled and _spread_logits(c),
             "Leave it out: without it plain and fsdp2 train with a teacher.", kind=NotBuiltError),
    ),
}  # fmt: skip
"""Class of a section or program -> its rows."""
_ALWAYS: tuple[Check, ...] = (out_of_bounds, problems_of_rows(TABLE))


def check_printed_sft(cfg: SupervisedConfig) -> None:
    """Of a supervised configuration that is only printed, what refuses it wherever it is started.

    Raises:
        ConfigError: as `validate_sft` does, without what only this machine, or torchrun, decides.
    """
    with unrecorded():
        collect((_sft_names, *_ALWAYS, optimizers.problems, profiling.sft_problems), cfg)


def validate_sft(cfg: SupervisedConfig) -> None:
    """All problems of a supervised run, also on pairs of answers, in one `ConfigError`; a notice of each idle setting."""
    rules = (host.trackers, host.sft_hardware, host.sft_files, host.kernel_problems, *_ALWAYS, optimizers.problems, _sft_engine, models.problems, runs.sft_row_problems,
             _teacher, profiling.sft_problems, resume_folder)  # fmt: skip
    with unrecorded():
        collect(rules, cfg)
        tell(TABLE, cfg)
        tell_without_effect(cfg)
        _tell_engines(cfg)
        if isinstance(cfg, SFTTrainerConfig) and cfg.distillation.enabled:
            from verl.config.rules import distillation

            distillation.sft_tell(cfg)


def _teacher(cfg: SupervisedConfig) -> Problems:
    if not (isinstance(cfg, SFTTrainerConfig) and cfg.distillation.enabled):
        return []
    from verl.config.rules import distillation

    return distillation.sft_problems(cfg)


def _tell_engines(cfg: SupervisedConfig) -> None:
    """Sections of the engines that a run is not on, and what its engine does not read."""
    engine, strategy = cfg.engine, cfg.engine.strategy
    for name, following in {"megatron": LIKE_ENGINE, "torchtitan": TITAN_LIKE_ENGINE}.items():
        if strategy != name:
            names = [key for key in set_names(engine[name]) if key not in following]
            tell_names(f"engine.{name}", names, f"has no effect without engine.strategy={name}")
            continue
        others = ("strategy", "megatron", "torchtitan")
        names = [key for key in set_names(engine) if key not in following and not key.startswith(others)]
        tell_names("engine", names, f"has no effect with engine.strategy={name}: its settings are engine.{name}")
    if strategy == "megatron":
        validate_megatron.tell_model("model", cfg.model, "engine")
    elif strategy == "torchtitan":
        validate_torchtitan.tell_model(role_of_supervised(cfg))


def _sft_engine(cfg: SupervisedConfig) -> Problems:
    strategy = cfg.engine.strategy
    problems = [] if strategy == "auto" else known_name(registry.ENGINES, "engine.strategy", strategy, ONE_DEVICE)
    return problems or validate_megatron.problems(cfg) + validate_torchtitan.supervised_problems(cfg)


def _sft_names(cfg: SupervisedConfig) -> Problems:
    strategy = cfg.engine.strategy
    names = [] if strategy == "auto" else known_name(registry.ENGINES, "engine.strategy", strategy, ONE_DEVICE)
    return names + models.vision_problems("model.path", cfg.model.path, cfg.model.external_lib, strategy)


def validate_generation(cfg: GenerationConfig) -> None:
    """All problems in one `ConfigError`."""
    with unrecorded():
        collect((_names_of_generation, out_of_bounds, problems_of_rows(TABLE), _sampler, _files_of_generation), cfg)


def _names_of_generation(cfg: GenerationConfig) -> Problems:
    problems = known_name(SAMPLERS, "rollout.name", cfg.rollout.name, "Set rollout.name=hf.")
    if cfg.rollout.name == "server" and not cfg.rollout.server.url:
        fix = "Set rollout.server.url=http://host:port."
        problems.append(ConfigError("needs the address of a server", key="rollout.name", got="server", fix=fix))
    return problems


def _sampler(cfg: GenerationConfig) -> Problems:
    problems = pools.sizes("rollout", cfg.rollout)
    if not problems:
        problems += pools.on_machine("rollout", cfg.rollout, cfg.trainer.device)
    return problems


def _files_of_generation(cfg: GenerationConfig) -> Problems:
    problems = missing_files("data.path", cfg.data.path) + bad_model_folder("model.path", cfg.model.path)
    problems += models.vision_problems("model.path", cfg.model.path, cfg.model.external_lib)
    return problems + _written("data.output_path", cfg.data.output_path, ".parquet")


def validate_evaluation(cfg: EvaluationConfig) -> None:
    """All problems in one `ConfigError`."""
    with unrecorded():
        collect((out_of_bounds, _files_of_evaluation), cfg)


def _files_of_evaluation(cfg: EvaluationConfig) -> Problems:
    report = cfg.report
    problems = missing_files("data.path", cfg.data.path)
    problems += missing_files("custom_reward_function.path", cfg.custom_reward_function.path)
    problems += missing_files("report.compare", report.compare)
    for name, ending in {"markdown": "", "json": "", "samples": ".parquet"}.items():
        problems += _written(f"report.{name}", report[name], ending)
    return problems


def _written(key: str, path: str | None, ending: str = "") -> Problems:
    """A file to write: its folder is there, or remote, and its name ends as its format does."""
    folder = (path or "").rpartition("/")[0]
    problems = missing_folder(key, folder) if folder and "://" not in folder else []
    if path is not None and not path.endswith(ending):
        fix = f"End its name in {ending}."
        problems.append(ConfigError(f"is written as {ending[1:]}", key=key, got=path, fix=fix))
    return problems

"""Rules about distillation: what teachers need, and where log-probs of several tokens can be computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from verl import registry
from verl.config.machine.config_json import facts_of, tokens_of
from verl.config.rules.checks import (
    NOTICE,
    Problems,
    Rule,
    Table,
    bad_model_folder,
    caught,
    out_of_bounds,
    problems_of_rows,
    value_at,
)
from verl.config.rules.checks import tell as tell_rows
from verl.config.rules.losses import weighs_samples
from verl.config.schema.algorithm import TOP_K_KINDS
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import changed_names
from verl.config.schema.root import (
    TEACHER_FIELDS,
    PPOTrainerConfig,
    Teacher,
    learns_from_pairs,
    learns_from_teachers_alone,
    teachers_in_roles,
    teachers_of,
    trains_on_older,
)
from verl.config.schema.sft import SFTTrainerConfig, teacher_of_files
from verl.config.schema.tree import in_range, one_of
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

_D, _A = "distillation", "actor_rollout_ref"
_L, _T = f"{_D}.distillation_loss", f"{_D}.teacher_models"
SCORING_APIS = ("auto", "vllm", "sglang", "verl")
"""Kinds of servers that give the log-probs of a prompt."""
READ_OF_URLS = frozenset({"name", "server", "max_num_seqs"})
READ_OF_HOSTS = READ_OF_URLS | {"dtype", "max_model_len", "max_num_batched_tokens", "prompt_length", "response_length"}


def _reads_top_k(cfg: PPOTrainerConfig) -> bool:
    return cfg.distillation.enabled and cfg.distillation.distillation_loss.loss_mode in TOP_K_KINDS


def _has_no_slope(cfg: PPOTrainerConfig) -> bool:
    loss = cfg.distillation.distillation_loss
    return cfg.distillation.enabled and loss.loss_mode in ("kl", "k1") and not loss.use_policy_gradient


def _idle(name: str) -> Rule:
    """A term of the policy's objective that belongs to the loss on rewards."""
    return Rule(
        f"{_A}.actor.{name}",
        f"has no effect with {_L}.use_task_rewards=false",
        lambda cfg: learns_from_teachers_alone(cfg) and name in changed_names(cfg.actor_rollout_ref.actor),
        kind=NOTICE,
    )


ROWS = (
    Rule(_T, "distillation needs a teacher", lambda cfg: cfg.distillation.enabled and not cfg.distillation.teacher_models,
         f"Name at least one: {_T}.teacher_model.model_path=FOLDER."),
    Rule(f"{_D}.enabled", "a loss on pairs trains on two of the answers to each prompt, and a teacher scores all of them",
         lambda cfg: cfg.distillation.enabled and learns_from_pairs(cfg),
         f"Take another {_A}.actor.policy_loss.loss_mode.", kind=NotBuiltError),
    Rule(f"{_L}.loss_mode", f"the gradient of {{got}} is 0 on average: {_L}.loss_mode=k1+ has the gradient of the KL, and "
         f"{_L}.use_policy_gradient=true takes it as a reward", _has_no_slope, kind=NOTICE),
    Rule(f"{_D}.nnodes", "has no effect: every teacher is behind servers",
         lambda cfg: cfg.distillation.nnodes and cfg.distillation.enabled and not teachers_in_roles(cfg), kind=NOTICE),
    *map(_idle, ("use_kl_loss", "entropy_coeff", "positive_lm_coef", "calculate_entropy", "clip_ratio", "clip_ratio_low",
                 "clip_ratio_high", "clip_ratio_c")),
)  # fmt: skip


TABLE: Table = {PPOTrainerConfig: ROWS}


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What is wrong with the teachers, and with the policy loss that takes their divergence as an advantage."""
    problems = [*problems_of_rows(TABLE)(cfg), *_policy_loss(cfg)]
    problems += [p for name, described in cfg.distillation.teacher_models.items() for p in _teacher(name, described)]
    return problems or [p for teacher in teachers_of(cfg) for p in _servers(cfg, teacher)] or _together(cfg)


def lacking(cfg: PPOTrainerConfig) -> Problems:
    """Folders of teachers that this machine does not have; a server that runs elsewhere has its folder there."""
    here = [teacher for teacher in teachers_of(cfg) if teacher.num_replicas or not teacher.is_served]
    return [problem for teacher in here for problem in bad_model_folder(teacher.setting, teacher.path)]


def tell(cfg: PPOTrainerConfig) -> None:
    """Notices of the rows, and of settings that the servers of a teacher, or one without servers, do not read."""
    tell_rows(TABLE, cfg)
    for teacher in teachers_of(cfg):
        if teacher.is_served:
            read = READ_OF_HOSTS if teacher.num_replicas else READ_OF_URLS
            for name in teacher.inference.keys() - read:
                notice(f"{teacher.key}.inference.{name}", "has no effect: the servers of a teacher sample nothing"
                       if teacher.num_replicas else "has no effect: it is set where the server is started")  # fmt: skip
            continue
        for idle in ("inference", "num_replicas"):
            if teacher.described.get(idle):
                why = f"has no effect: the teacher is a role, and runs as {_A}.ref says. Behind servers it is with "
                notice(
                    f"{teacher.key}.{idle}", f"{why}inference.name=hf and num_replicas, or with inference.server.url"
                )


def _teacher(name: str, described: Any) -> Problems:
    key = f"{_T}.{name}"
    if not isinstance(described, Mapping):
        allowed = f"a mapping with {', '.join(TEACHER_FIELDS)}"
        return [ConfigError("not the description of a teacher", key=key, got=described, allowed=allowed)]
    problems = [problem for field in described for problem in one_of(key, field, TEACHER_FIELDS)]
    if not described.get("model_path"):
        problems.append(ConfigError("a teacher needs a model", key=f"{key}.model_path", fix="Name its folder."))
    inference, replicas = described.get("inference") or {}, described.get("num_replicas") or 0
    if not isinstance(inference, Mapping):
        allowed = f"a mapping with settings of {_A}.rollout"
        problems.append(
            ConfigError("not the settings of servers", key=f"{key}.inference", got=inference, allowed=allowed)
        )
    is_count = type(replicas) is int and replicas >= 0
    return problems + in_range(f"{key}.num_replicas", replicas, "0 or more, a whole number", is_count)


def _servers(cfg: PPOTrainerConfig, teacher: Teacher) -> Problems:
    """What is wrong with the servers of a teacher, and with those that a teacher in a role cannot have."""
    key, inference, count = f"{teacher.key}.inference", teacher.inference, teacher.num_replicas
    name = str(inference.get("name"))
    by_url = f"{key}.name=server +{key}.server.url=[http://host:8000,...]"
    problems = one_of(f"{key}.name", name, ("hf", "vllm", "sglang", "trtllm", "server"))
    if problems or not teacher.is_served:
        if count > 1 and not problems:
            message = f"servers of {name} are not started for a teacher yet"
            fix = f"Start them, and set {by_url} without num_replicas; or set {key}.name=hf, for hosts of this library."
            problems = [NotBuiltError(message, key=f"{teacher.key}.num_replicas", got=count, allowed="0 or 1", fix=fix)]
        return problems
    try:
        rollout = teacher.servers(cfg.actor_rollout_ref.rollout)
    except ConfigError as error:
        return [_below(key, error)]
    problems = [_below(key, error) for error in out_of_bounds(rollout)]
    if name not in ("hf", "server", "sglang"):
        message = f"the addresses of servers that run already are read by the names server and sglang, not by {name}"
        problems.append(ConfigError(message, key=f"{key}.name", got=name, fix=f"Set {key}.name=server."))
    elif name != "hf" and not rollout.server.url:
        problems.append(
            ConfigError("a teacher behind a server needs its address", key=f"{key}.server.url", fix=f"Set {by_url}.")
        )
    if rollout.server.url and (count or name == "hf"):
        message = "servers that run already, and servers that the run starts"
        fix = f"Leave num_replicas out and set {key}.name=server, or leave the addresses out."
        problems.append(ConfigError(message, key=teacher.key, got=rollout.server.url, fix=fix))
    api = rollout.server.api
    if api in ("tgi", "openai"):
        message = f"a server of kind {api!r} gives no log-probs of tokens that are sent to it"
        problems.append(ConfigError(message, key=f"{key}.server.api", got=api, allowed=SCORING_APIS))
    temperature = cfg.actor_rollout_ref.rollout.temperature
    if api in ("vllm", "sglang") and temperature != 1:
        message = f"log-probs are those at this temperature, and servers of {api} give those at 1 alone"
        fix = f"Set it to 1, or take hosts of this library: {key}.name=hf with num_replicas."
        problems.append(ConfigError(message, key=f"{_A}.rollout.temperature", got=temperature, allowed="1", fix=fix))
    return problems


def _below(section: str, error: ConfigError) -> ConfigError:
    """The same of a key that is relative to a section."""
    return type(error)(error.message, key=f"{section}.{error.key}", got=error.got, allowed=error.allowed, fix=error.fix)


def _together(cfg: PPOTrainerConfig) -> Problems:
    """Teachers that serve the same rows, or have the same role; vocabularies that differ from the policy's."""
    teachers, problems = list(teachers_of(cfg)), list[ConfigError]()
    for role, count in Counter(teacher.name for teacher in teachers).items():
        if count > 1:
            fix = "Rename one of them."
            problems.append(ConfigError("two teachers have the same role", key=_T, got=role, fix=fix))
    for value, count in Counter(teacher.serves for teacher in teachers).items():
        if count > 1:
            fix = f"Give each the {cfg.distillation.teacher_key} of its rows; one may be without, for all others."
            message = "several teachers serve the same rows"
            problems.append(ConfigError(message, key=f"{_T}.*.key", got=value, fix=fix))
    policy = cfg.actor_rollout_ref.model
    single = f"Take {_L}.loss_mode=k3+, which reads the sampled tokens alone." if _reads_top_k(cfg) else None
    return problems + [p for teacher in teachers for p in _other_tokens(policy, teacher.setting, teacher.path, single)]


def _other_tokens(policy: HFModelConfig, key: str, path: str, fix: str | None) -> Problems:
    """A teacher whose probabilities are of other tokens; rows of padding in its head do no harm to a sampled token.

    Args:
        key, path: of the teacher.
        fix: what to change where heads have different sizes; None where that does no harm.
    """
    student, theirs = tokens_of(policy.tokenizer_path or policy.path), tokens_of(path)
    if student and theirs and student != theirs:
        differing = sorted({token for token, _ in student.items() ^ theirs.items()})
        message = f"this teacher has other tokens than its student ({len(differing)} differ, such as {differing[0]!r})"
        return [ConfigError(message, key=key, got=path, fix="Take a teacher of the same family.")]
    sizes = [(facts_of(folder) or {}).get("vocab_size") for folder in (policy.path, path)]
    if fix is not None and None not in sizes and sizes[0] != sizes[1]:
        message = f"the student's head has {sizes[0]} rows and this teacher's {sizes[1]}"
        return [ConfigError(message, key=key, got=path, fix=fix)]
    return []


def sft_problems(cfg: SFTTrainerConfig) -> Problems:
    """What is wrong with the teacher of a run on the answers of files."""
    models = cfg.distillation.teacher_models
    problems = [problem for name, described in models.items() for problem in _teacher(name, described)]
    if len(models) > 1:
        fix = "Name one; on the policy's samples (verl train) several share the rows."
        problems.append(NotBuiltError("one teacher scores the answers of files", key=_T, got=list(models), fix=fix))
    if problems or not models:
        return problems
    key, path = teacher_of_files(cfg.distillation)
    fix = "Take a teacher whose head has as many rows."
    return bad_model_folder(key, path) + _other_tokens(cfg.model, key, path, fix)


def sft_tell(cfg: SFTTrainerConfig) -> None:
    """Notices of what a teacher of files does not read: it scores every row, in the student's processes."""
    for name, described in cfg.distillation.teacher_models.items():
        for idle in ("key", "inference", "num_replicas"):
            if described.get(idle):
                notice(f"{_T}.{name}.{idle}", "has no effect: one teacher scores all rows, in the student's processes")


def _policy_loss(cfg: PPOTrainerConfig) -> Problems:
    """A loss that takes the negative divergences as its advantages, with the actor's other settings."""
    loss, key, actor = cfg.distillation.distillation_loss, f"{_L}.policy_loss_mode", cfg.actor_rollout_ref.actor
    mode, fix = loss.policy_loss_mode, "Leave it out: vanilla."
    if not loss.use_policy_gradient or caught(registry.POLICY_LOSSES.check, mode):
        return []
    facts = registry.POLICY_LOSSES.facts(mode)
    if facts.pairs or mode in ("bypass_mode", "rollout_correction"):
        message = "a loss on pairs reads no advantages" if facts.pairs else "it is the loss of the bypass mode"
        return [ConfigError(message, key=key, got=mode, fix=fix)]
    if facts.on_policy and trains_on_older(cfg) and not weighs_samples(cfg):
        message = (
            "this loss has no ratio to the policy that drew a sample, and samples of older versions are trained on"
        )
        return [ConfigError(message, key=key, got=mode, fix=fix)]
    message = f"the policy loss {mode!r} has no default for it"
    missing = [name for name in facts.required if value_at(actor, name) is None]
    return [ConfigError(message, key=f"{_A}.actor.{name}", got=None, fix="Set it.") for name in missing]

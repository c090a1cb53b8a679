"""Rules about what is sampled: the correction of its distribution, formats of weights, dynamic sampling, router replay.

The log-probs that a sampler reports may not be the trainer's, whose distribution is the model's at the temperature.
"""

from __future__ import annotations

from typing import Any

from verl.config.machine.config_json import experts_of, facts_of
from verl.config.machine.models import shows_images
from verl.config.rules.checks import NOTICE, Problems, Rule, caught, value_at
from verl.config.schema.algorithm import importance_sampling, rejections, weight_bounds
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.root import (
    PPOTrainerConfig,
    corrects_rollout,
    kl_kinds,
    learns_from_pairs,
    of_estimator,
    of_schedule,
    sampler_is_old_policy,
    skips_old_log_prob,
    updates_once,
    uses_reference,
)
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

_R, _NEWER, _OLDER = "actor_rollout_ref.rollout", "algorithm.rollout_correction", "algorithm.rollout_is"
_MIRROR = "actor_rollout_ref.actor.policy_loss.rollout_correction"
_MODE, _REF_MODE = "actor_rollout_ref.actor.router_replay.mode", "actor_rollout_ref.ref.router_replay.mode"
_RECORD, _INTERVAL = f"{_R}.enable_rollout_routing_replay", f"{_R}.moe_load_balance_metrics_interval"
FORMATS = {"hf": ("fp8", "int8"), "vllm": ("fp8", "torchao"), "sglang": ("fp8",)}
"""Formats of weights (``rollout.quantization``) that each sampler has; vLLM rounds to int8 by torchao."""
_OTHER_FORMAT = {
    ("vllm", "int8"): "Set quantization=torchao, and quantization_config_file to a file with its Int8WeightOnlyConfig.",
    ("hf", "torchao"): "It rounds by itself: set quantization=int8 or fp8.",
}


def _switch(cfg: PPOTrainerConfig) -> str | None:
    """The setting that switches a correction of the sampler's distribution on; the newer form first."""
    newer = cfg.algorithm.rollout_correction
    switches = {
        f"{_NEWER}.bypass_mode": newer.bypass_mode,
        f"{_NEWER}.rollout_is": newer.rollout_is is not None,
        f"{_NEWER}.rollout_rs": newer.rollout_rs is not None,
        f"{_OLDER}_threshold": cfg.algorithm.rollout_is_threshold is not None,
        _OLDER: cfg.algorithm.rollout_is,
    }
    return next((key for key, is_on in switches.items() if is_on), None)


def _two_forms(cfg: PPOTrainerConfig) -> bool:
    return cfg.algorithm.rollout_is_threshold is not None and (_switch(cfg) or "").startswith(_NEWER)


def _compares_raw(cfg: PPOTrainerConfig) -> list[str]:
    """The settings that compare raw log-probs with those of another temperature."""
    rollout, switch = cfg.actor_rollout_ref.rollout, _switch(cfg)
    if rollout.logprobs_mode != "raw_logprobs" or rollout.temperature == 1:
        return []
    quantized = [f"{_R}.quantization_tolerance"] if rollout.quantization is not None else []
    return [*quantized, *([switch] if switch else [])]


def _raw(number: int) -> Rule:
    return Rule(
        f"{_R}.logprobs_mode",
        lambda cfg: (
            f"{_compares_raw(cfg)[number]} compares raw log-probs, of temperature 1, with the trainer's, of "
            f"temperature {cfg.actor_rollout_ref.rollout.temperature}"
        ),
        lambda cfg: len(_compares_raw(cfg)) > number,
        f"Leave it out, or set {_R}.temperature=1.",
    )


def _filters(cfg: PPOTrainerConfig) -> bool:
    return cfg.algorithm.filter_groups.enable


def records_experts(rollout: RolloutConfig) -> bool:
    """Whether the sampler of this section says which experts it chose."""
    return bool(rollout.enable_rollout_routing_replay or rollout.moe_load_balance_metrics_interval > 0)


def _recorder(cfg: PPOTrainerConfig) -> str:
    """The setting by which experts are recorded."""
    return _RECORD if cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay else _INTERVAL


def _records(cfg: PPOTrainerConfig) -> bool:
    return records_experts(cfg.actor_rollout_ref.rollout)


def _replays(cfg: PPOTrainerConfig, mode: str) -> bool:
    return cfg.actor_rollout_ref.actor.router_replay.mode == mode


def _ref_replays(cfg: PPOTrainerConfig) -> bool:
    """The reference replays what the actor does."""
    policy = cfg.actor_rollout_ref
    return policy.ref.router_replay.mode == policy.actor.router_replay.mode != "disabled"


def _no_pass_for_ref(cfg: PPOTrainerConfig) -> bool:
    return _ref_replays(cfg) and _replays(cfg, "R2") and skips_old_log_prob(cfg) and uses_reference(cfg)


def _is_dense(cfg: PPOTrainerConfig) -> bool:
    facts = facts_of(cfg.actor_rollout_ref.model.path)
    return facts is not None and experts_of(facts) is None


def _exact(cfg: PPOTrainerConfig) -> str:
    return next((key for key, kind in kl_kinds(cfg).items() if kind == "full"), "")


_AT_UPDATE, _KEEPS, _RATE = f"{_R}.requests_at_update", f"{_R}.keep_unfinished", f"{_R}.over_sample_rate"
_IN_TURN = ("sync", "one_step_off")


def _mixes(cfg: PPOTrainerConfig) -> bool:
    return cfg.actor_rollout_ref.rollout.requests_at_update != "wait"


def _unrecorded(key: str) -> Rule:
    """A setting by which several versions draw one response, without the log-probs of each."""
    return Rule(
        f"{_R}.calculate_log_probs",
        lambda cfg: (
            f"{key}={value_at(cfg, key)} lets several versions draw one response, whose log-probs no single version can "
            "recompute"
        ),
        lambda cfg: not cfg.actor_rollout_ref.rollout.calculate_log_probs and value_at(cfg, key) not in ("wait", False),
        "Set {key}=true: each token keeps the log-prob of the version that drew it.",
    )


def _forgets_age(cfg: PPOTrainerConfig) -> bool:
    """Responses continue in the next step, with no bound on their age, and no term of the loss accounts for it."""
    accounts_for_age = sampler_is_old_policy(cfg) or corrects_rollout(cfg) or learns_from_pairs(cfg)
    return cfg.actor_rollout_ref.rollout.keep_unfinished and not (of_schedule(cfg).queue or accounts_for_age)


def _lacks_tensors(cfg: PPOTrainerConfig) -> bool:
    """Rows have images without their tensors; other products' servers read the images themselves."""
    rollout = cfg.actor_rollout_ref.rollout
    is_host = rollout.name == "server" and rollout.server.api == "verl"
    needs = rollout.name in ("hf", "vllm") or is_host or not cfg.trainer.val_only
    return needs and not cfg.data.return_multi_modal_inputs and shows_images(cfg)


_DENSE = "the model is dense: it has no experts that could be recorded or replayed"
_NO_PASS = "R2 replays the experts of the pass over old log-probs, and this run makes no such pass"
OF_OLDER_VERSIONS = (
    *map(_unrecorded, (_AT_UPDATE, _KEEPS)),
    Rule(f"{_NEWER}.bypass_mode", f"{_KEEPS}=true trains on tokens of older versions, and nothing accounts for the difference",
         _forgets_age, f"Set {_NEWER}.bypass_mode=true (the old log-probs are those of the version that drew each token), or a "
         f"correction, e.g. {_NEWER}.rollout_is=token."),
    Rule(_KEEPS, f"has no effect with {_AT_UPDATE}=wait: an update waits for the responses in flight",
         lambda cfg: cfg.actor_rollout_ref.rollout.keep_unfinished and of_schedule(cfg).queue and not _mixes(cfg), kind=NOTICE),
    Rule(_KEEPS, f"has no effect with {_RATE}=0, which samples no more prompts than a step trains on, so all are waited for; "
         f"{_RATE}=0.25 leaves a quarter in work",
         lambda cfg: cfg.actor_rollout_ref.rollout.keep_unfinished and not of_schedule(cfg).queue
         and cfg.actor_rollout_ref.rollout.over_sample_rate == 0 and not _filters(cfg), kind=NOTICE),
    Rule(_AT_UPDATE, "has no effect with trainer.v1.trainer_mode={trainer.v1.trainer_mode}: no request runs when weights arrive",
         lambda cfg: _mixes(cfg) and cfg.trainer.v1.trainer_mode in _IN_TURN, kind=NOTICE),
    Rule(_AT_UPDATE, "has no effect with actor_rollout_ref.hybrid_engine=true: samplers and trainers take turns",
         lambda cfg: _mixes(cfg) and cfg.trainer.v1.trainer_mode not in _IN_TURN and cfg.actor_rollout_ref.hybrid_engine,
         kind=NOTICE),
)  # fmt: skip
"""Of responses that several versions of the policy draw: over several steps, or while weights arrive."""
ROWS = (
    Rule(f"{_R}.calculate_log_probs",
         lambda cfg: f"{_switch(cfg)} compares the trainer's log-probs with the sampler's, which are not kept",
         lambda cfg: _switch(cfg) and not cfg.actor_rollout_ref.rollout.calculate_log_probs, "Set {key}=true."),
    Rule(lambda cfg: str(_switch(cfg)), lambda cfg: f"{_OLDER}_threshold and {_switch(cfg)} are two forms of one correction",
         _two_forms, "Keep one of them.", shows=False),
    _raw(0),
    _raw(1),
    Rule(f"{_NEWER}.bypass_mode", "the estimator {algorithm.adv_estimator!r} needs the pass over old log-probs, which the "
         "bypass mode leaves out", lambda cfg: cfg.algorithm.rollout_correction.bypass_mode and of_estimator(cfg).old_log_probs,
         "Set it to false."),
    Rule("algorithm.filter_groups.max_inflight_gen_batches", "at least one batch of prompts is sampled at a time",
         lambda cfg: _filters(cfg) and cfg.algorithm.filter_groups.max_inflight_gen_batches < 1, allowed="1 or more"),
    Rule("algorithm.filter_groups.metric",
         "with a KL in the reward no two samples have the same final reward, so that nothing would be dropped",
         lambda cfg: _filters(cfg) and cfg.algorithm.filter_groups.max_inflight_gen_batches >= 1
         and cfg.algorithm.filter_groups.metric == "seq_final_reward" and cfg.algorithm.use_kl_in_reward,
         "Set {key}=seq_reward, the score before the KL."),
    Rule(f"{_R}.quantization_tolerance", "out of range", lambda cfg: cfg.actor_rollout_ref.rollout.quantization is not None
         and cfg.actor_rollout_ref.rollout.quantization_tolerance <= 0, allowed="above 0"),

    # router replay
    Rule(_INTERVAL, "no number of steps", lambda cfg: cfg.actor_rollout_ref.rollout.moe_load_balance_metrics_interval < 0,
         allowed="0 (never), or 1 or more"),
    Rule(_recorder, "the sampler {actor_rollout_ref.rollout.name} does not say which experts it chose",
         lambda cfg: _records(cfg) and cfg.actor_rollout_ref.rollout.name != "hf", f"Leave it out, or set {_R}.name=hf.",
         kind=NotBuiltError),
    Rule(_recorder, f"a sampler in a process of its own ({_R}.checkpoint_engine.backend) does not send the experts it chose",
         lambda cfg: _records(cfg) and cfg.actor_rollout_ref.rollout.name == "hf"
         and cfg.actor_rollout_ref.rollout.checkpoint_engine.backend != "naive",
         f"Leave it out, or {_R}.checkpoint_engine.backend.", kind=NotBuiltError),
    Rule(_recorder, _DENSE, lambda cfg: _records(cfg) and _is_dense(cfg), "Leave it out."),
    Rule(_MODE, _DENSE, lambda cfg: not _replays(cfg, "disabled") and not _records(cfg) and _is_dense(cfg), "Leave it out."),
    Rule(_REF_MODE, f"the reference replays the experts that the actor replays, and {_MODE} is "
         "{actor_rollout_ref.actor.router_replay.mode}",
         lambda cfg: cfg.actor_rollout_ref.ref.router_replay.mode not in ("disabled",
                                                                         cfg.actor_rollout_ref.actor.router_replay.mode),
         "Set both alike.",
         lambda cfg: list(dict.fromkeys(("disabled", cfg.actor_rollout_ref.actor.router_replay.mode)))),
    Rule(_REF_MODE, _NO_PASS, _no_pass_for_ref, "Set trainer.skip_old_log_prob=false, or leave it out."),
    Rule(_REF_MODE, lambda cfg: f"the reference of an exact KL ({_exact(cfg)}) chooses its experts itself",
         lambda cfg: _ref_replays(cfg) and not _no_pass_for_ref(cfg) and _exact(cfg),
         lambda cfg: f"Leave it out, or take another kind of {_exact(cfg)}.", kind=NotBuiltError),
    Rule(_RECORD, "R3 replays the experts that the sampler chose, which are not recorded",
         lambda cfg: _replays(cfg, "R3") and not cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay,
         f"Set {_RECORD}=true, or {_MODE}=R2."),
    Rule(_MODE, _NO_PASS, lambda cfg: _replays(cfg, "R2") and skips_old_log_prob(cfg) and not updates_once(cfg),
         "Set it to R3, or leave out what takes other log-probs as the old ones (bypass_mode, use_rollout_log_probs)."),
    Rule(_MODE, "R2 has no effect: with one update per batch the experts are those of that very pass",
         lambda cfg: _replays(cfg, "R2") and updates_once(cfg) and skips_old_log_prob(cfg), kind=NOTICE),
    Rule(_REF_MODE, "has no effect: no reference policy is used",
         lambda cfg: cfg.actor_rollout_ref.ref.router_replay.mode != "disabled" and not uses_reference(cfg), kind=NOTICE),
    Rule(_RECORD, f"what the sampler records is not replayed with {_MODE}={{actor_rollout_ref.actor.router_replay.mode}}",
         lambda cfg: cfg.actor_rollout_ref.rollout.enable_rollout_routing_replay and not _replays(cfg, "R3"), kind=NOTICE),

    Rule("data.return_multi_modal_inputs", "false leaves out the tensors of images and videos, without which the sampler "
         f"({_R}.name={{actor_rollout_ref.rollout.name}}) refuses a request, or the trainer takes placeholders for text",
         _lacks_tensors, "Set {key}=true."),
    *OF_OLDER_VERSIONS,
    Rule("data.min_response_length", f"has no effect: {_R}.ignore_eos=true makes every response as long as can be",
         lambda cfg: cfg.data.min_response_length and cfg.actor_rollout_ref.rollout.ignore_eos, kind=NOTICE),
)  # fmt: skip
OF_SAMPLER = (
    Rule("quantization", "the sampler {name} has no such format",
         lambda r: r.quantization is not None and FORMATS.get(r.name) and r.quantization not in FORMATS[r.name],
         lambda r: _OTHER_FORMAT.get((r.name, r.quantization), ""), lambda r: FORMATS[r.name]),
    Rule("quantization_config_file", "torchao's configuration comes in a file, and no other format has one",
         lambda r: (r.quantization == "torchao") != (r.quantization_config_file is not None), "Give both, or neither."),
)  # fmt: skip
"""Of a rollout section, in whatever program."""


def thresholds(cfg: PPOTrainerConfig) -> Problems:
    """Thresholds of the correction in both forms, and in the bypass mode's loss, which mirrors them."""
    algorithm, newer, mirror = cfg.algorithm, cfg.algorithm.rollout_correction, _mirror_of(cfg)
    problems: Problems = []
    if algorithm.rollout_is_threshold is not None:
        names = ("threshold", "threshold_lower", "level", "mode", "veto_threshold")
        problems += caught(importance_sampling, *(algorithm[f"rollout_is_{name}"] for name in names))
    if newer.rollout_is is not None:
        problems += caught(weight_bounds, newer.rollout_is_threshold)
    if newer.rollout_rs is not None:
        problems += caught(rejections, newer.rollout_rs, newer.rollout_rs_threshold)
    if problems:
        return problems
    if mirror.rollout_is_threshold != newer.rollout_is_threshold:
        problems += caught(weight_bounds, mirror.rollout_is_threshold)
    if mirror.rollout_rs is not None:
        problems += caught(rejections, mirror.rollout_rs, mirror.rollout_rs_threshold)
    keys = [str(error.key).replace(_NEWER, _MIRROR) for error in problems]
    return [ConfigError(e.message, key=key, got=e.got, allowed=e.allowed, fix=e.fix) for e, key in zip(problems, keys)]


def _mirror_of(cfg: PPOTrainerConfig) -> Any:
    return cfg.actor_rollout_ref.actor.policy_loss.rollout_correction


def tell(cfg: PPOTrainerConfig) -> None:
    """Where the sampler's log-probs are of another distribution than the trainer's: a notice for each difference."""
    rollout = cfg.actor_rollout_ref.rollout
    compares = corrects_rollout(cfg) or cfg.algorithm.rollout_correction.bypass_mode
    filters = [f"{_R}.top_p"] * (rollout.top_p < 1) + [f"{_R}.top_k"] * (rollout.top_k > 0)
    shortest = cfg.data.min_response_length > 0 and not rollout.ignore_eos
    penalty = [f"{_R}.repetition_penalty"] * (rollout.repetition_penalty != 1)
    adjustments = penalty + ["data.min_response_length"] * shortest
    if rollout.logprobs_mode == "raw_logprobs":
        _tell_raw(rollout, [*adjustments, *filters] if compares else [])
        return
    if filters and compares:
        why = "the sampler's log-probs are those of the filtered distribution, the trainer's are not: the rollout correction "
        notice(filters[0], f"{why}sees ratios of at most 1 even with equal weights")
    if adjustments:
        also = f" (and {adjustments[1]})" if adjustments[1:] else ""
        seen = "training/rollout_probs_diff_* and algorithm.rollout_correction see"
        then = "the rollout correction sees" if compares else seen
        why = f"the sampler draws with it{also} and reports the log-probs of what it draws from; the trainer's are without it. "
        notice(adjustments[0], f"{why}Only {then} the difference, even with equal weights")


def _tell_raw(rollout: RolloutConfig, unseen: list[str]) -> None:
    key = f"{_R}.logprobs_mode"
    if not rollout.calculate_log_probs:
        notice(key, f"has no effect without {_R}.calculate_log_probs=true")
    elif rollout.temperature != 1:
        why = f"raw log-probs are of temperature 1, the trainer's of temperature {rollout.temperature}: "
        notice(key, f"{why}training/rollout_probs_diff_* shows both this and what differs between the engines")
    elif unseen:
        notice(key, f"the rollout correction does not see that responses are drawn with {', '.join(unseen)}")

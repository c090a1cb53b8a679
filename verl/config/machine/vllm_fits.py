"""What vLLM refuses at its start, checked before: steps too small for their responses, contexts, ranks of adapters.

Its own limits, as of 0.32 (``SchedulerConfig``, ``ModelConfig``, ``LoRAConfig``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl import env
from verl.config.machine.config_json import facts_of
from verl.config.machine.sampler_sizes import starts_no_engine
from verl.config.rules.checks import Problems
from verl.config.schema.root import PPOTrainerConfig
from verl.errors import ConfigError

MOST_RANK = 512
_R, _M = "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Of the sampler of a run; what ``engine_kwargs.vllm`` says otherwise is left to vLLM."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.name != "vllm" or starts_no_engine(rollout) or rollout.engine_kwargs.vllm:
        return []
    return [*_steps(rollout), *_context(rollout, cfg.actor_rollout_ref.model), *_rank(cfg.actor_rollout_ref.model)]


def _steps(rollout: Any) -> Problems:
    """Every response that is sampled at once has a token in each step."""
    tokens, most = rollout.max_num_batched_tokens, rollout.max_num_seqs
    if not rollout.enable_chunked_prefill:  # the sampler makes room for the longest sequence then
        tokens = max(tokens, rollout.max_model_len or rollout.prompt_length + rollout.response_length)
    if most <= tokens or tokens < 1:
        return []
    message = f"a step computes {tokens} tokens, which are fewer than one for each of {most} responses"
    key, fix = f"{_R}.max_num_seqs", f"Lower it, or set {_R}.max_num_batched_tokens={most} or more."
    return [ConfigError(message, key=key, got=most, allowed=f"at most {tokens}", fix=fix)]


def _context(rollout: Any, model: Any) -> Problems:
    """A context of one's own, longer than the positions that the model knows."""
    facts, length = facts_of(model.path), rollout.max_model_len
    if facts is None or length is None or model.override_config or env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        return []
    positions = facts.get("max_position_embeddings")
    if not isinstance(positions, int) or length <= positions or _scales_positions(facts):
        return []
    message = f"the model knows {positions} positions (max_position_embeddings in its config.json)"
    fix = "Leave it out, or give the model longer positions: model.override_config.rope_scaling."
    return [ConfigError(message, key=f"{_R}.max_model_len", got=length, allowed=f"at most {positions}", fix=fix)]


def _scales_positions(facts: Mapping[str, Any]) -> bool:
    """Whether the rotary embedding may reach beyond the positions that the model names."""
    rope = facts.get("rope_scaling") or facts.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return True  # it is vLLM's to refuse
    each_kind = [kind for kind in rope.values() if isinstance(kind, Mapping)] or [rope]
    return any(kind.get("rope_type", kind.get("type", "default")) != "default" for kind in each_kind)


def _rank(model: Any) -> Problems:
    if model.lora.merge or model.lora_rank <= MOST_RANK:
        return []
    fix = f"Lower it, or set {_M}.lora.merge=true: merged weights are sent then."
    message, key = "vLLM has no room for an adapter of this rank", f"{_M}.lora_rank"
    return [ConfigError(message, key=key, got=model.lora_rank, allowed=f"at most {MOST_RANK}", fix=fix)]

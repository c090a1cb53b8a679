"""What a model has, heads, layers, experts and towers, against the processes that share it; checked before it is loaded.

Of the backends that shard by FSDP, and of samplers; `validate_megatron` and `validate_torchtitan` have those of other
backends. The engines check again what they are given. What only the model's own class knows, such as the names of its
modules, is said when it is made. Limits of vLLM are those of 0.32 (``SchedulerConfig``, ``ModelConfig``, ``LoRAConfig``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl import env
from verl.config.machine.config_json import (
    NEVER_PACKED,
    NOT_SAMPLED,
    adapter_on_experts,
    carries_state,
    config_json,
    experts_of,
    facts_of,
)
from verl.config.machine.pools import OWN_PROCESSES, EngineRole, roles, starts_no_engine
from verl.config.rules.checks import Problems, caught, divisors_of, uneven
from verl.config.schema.node import ConfigNode
from verl.config.schema.root import PPOTrainerConfig
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.sft import SupervisedConfig

_ULYSSES, _EXPERT = "ulysses_sequence_parallel_size", "expert_parallel_size"
_R = "actor_rollout_ref.rollout"
_HEADS = ("lm_head", "embed_out")
_T, _P = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def problems(cfg: PPOTrainerConfig | SupervisedConfig) -> Problems:
    """Of every model on a backend that shards by FSDP, and of the sampler of an RL run."""
    problems = [p for role in roles(cfg) for p in (*of_role(role), *_quantized(role), *_tied(role))]
    return problems + of_sampler(cfg) if isinstance(cfg, PPOTrainerConfig) else problems


def of_role(role: EngineRole) -> Problems:
    """What cannot be shared, and what cannot be shared together."""
    engine = role.others[1]
    if role.has_own_sizes or any(engine[name] < 1 for name in (_ULYSSES, _EXPERT)):
        return []  # numbers below 1 are refused for themselves
    return _together(role) or [*_hybrid(role), *_divided(role), *_packed(role), *_with_state(role), *_adapter(role)]


def _together(role: EngineRole) -> Problems:
    """Experts are not shared under hybrid sharding."""
    key, engine = role.others
    if engine[_EXPERT] == 1 or not 0 < engine.fsdp_size < role.processes:
        return []
    message = f"experts cannot be shared under hybrid sharding (fsdp_size={engine.fsdp_size})"
    fix = f"Leave out {key}.fsdp_size or this one."
    return [ConfigError(message, key=f"{key}.{_EXPERT}", got=engine[_EXPERT], allowed=[1], fix=fix)]


def _hybrid(role: EngineRole) -> Problems:
    key, engine = role.others
    size = engine.fsdp_size
    if size < 1 or role.processes < 1 or size >= role.processes or role.processes % size == 0:
        return []
    message = f"{role.processes} processes do not divide into groups of {size} that share one copy of the weights"
    fix = "Set it to one of these, or to -1 for one copy over all of them."
    return [ConfigError(message, key=f"{key}.fsdp_size", got=size, allowed=divisors_of(role.processes), fix=fix)]


def _divided(role: EngineRole) -> Problems:
    """Heads, or experts, divide evenly over their peers."""
    key, engine = role.others
    facts = facts_of(role.path)
    if facts is None:
        return []
    heads, experts = facts.get("num_attention_heads"), experts_of(facts)
    divisors = [(_ULYSSES, heads, "attention heads"), (_EXPERT, experts, "experts")]
    problems: Problems = []
    for name, count, what in divisors:
        problems += uneven(f"{key}.{name}", engine[name], count, what)
    if engine[_EXPERT] > 1 and experts is None and heads:
        message = "a model without experts cannot share them among processes"
        fix = "Leave it out."
        problems.append(ConfigError(message, key=f"{key}.{_EXPERT}", got=engine[_EXPERT], allowed=[1], fix=fix))
    return problems


def _packed(role: EngineRole) -> Problems:
    key, engine = role.others
    if engine[_ULYSSES] == 1 or role.model is None or role.model.use_remove_padding:
        return []
    packing = f"{role.model_key}.use_remove_padding"
    message, fix = "sequences are shared only where rows are packed", f"Set {packing}=true, or leave it out."
    return [ConfigError(f"{message}, and {packing} is false", key=f"{key}.{_ULYSSES}", got=engine[_ULYSSES], fix=fix)]


def _with_state(role: EngineRole) -> Problems:
    """Layers that carry a state need where each sequence begins, and all tokens in front of theirs."""
    key, engine = role.others
    facts = facts_of(role.path)
    if facts is None or not carries_state(facts):
        return []
    family = facts.get("model_type")
    if engine[_ULYSSES] > 1:
        message = f"{family} has layers that carry a state from token to token, which processes cannot share yet"
        fix = "Leave it out: every process then computes rows of its own."
        return [NotBuiltError(message, key=f"{key}.{_ULYSSES}", got=engine[_ULYSSES], fix=fix)]
    if role.model is not None and role.model.use_remove_padding and family in NEVER_PACKED:
        packing = f"{role.model_key}.use_remove_padding"
        message = f"packed rows of {family} would carry a state from one sequence into the next"
        return [NotBuiltError(message, key=packing, got=True, fix=f"Set {packing}=false: padded rows are exact.")]
    return []


def _adapter(role: EngineRole) -> Problems:
    """An adapter on every module covers the experts' weights too, which are no linear layers."""
    key, engine = role.others
    facts = facts_of(role.path)
    if engine[_EXPERT] == 1 or role.adapter is None or facts is None or experts_of(facts) is None:
        return []
    name = adapter_on_experts(role.model)
    if name is None:
        return []
    message = f"an adapter on the experts of a mixture is not built yet with {key}.{_EXPERT}={engine[_EXPERT]}"
    fix = "Name linear layers, such as target_modules=[q_proj,k_proj,v_proj,o_proj], or share no experts."
    return [NotBuiltError(message, key=f"{role.model_key}.{name}", got=role.model[name], fix=fix)]


def _tied(role: EngineRole) -> Problems:
    """A head that is the embeddings' weight gets no adapter: merged, it would change the embeddings, too."""
    facts = facts_of(role.path)
    if role.adapter is None or role.model.lora_adapter_path or facts is None:
        return []
    targets, key = role.model.target_modules, f"{role.model_key}.target_modules"
    heads = [name for name in _HEADS if isinstance(targets, list) and name in targets]
    if not heads or not role.model.override_config.get("tie_word_embeddings", facts.get("tie_word_embeddings")):
        return []
    message = (
        f"an adapter on {heads[0]} cannot be merged: its weight is that of the embeddings, too, which would change"
    )
    fix = f"Leave {heads[0]} out, or take a model whose config.json says tie_word_embeddings=false."
    return [ConfigError(message, key=key, got=targets, fix=fix)]


def _quantized(role: EngineRole) -> Problems:
    """A base in 4 bits needs an adapter on top, in one process."""
    if role.model is None or "lora_base_quantization" not in role.model or role.model.lora_base_quantization is None:
        return []
    key, got = f"{role.model_key}.lora_base_quantization", role.model.lora_base_quantization
    if role.model.lora_rank == 0 and role.model.lora_adapter_path is None:
        message, fix = (
            "weights in 4 bits are not trained: they are the base of an adapter",
            f"Set {role.model_key}.lora_rank=16.",
        )
        return [ConfigError(message, key=key, got=got, fix=fix)]
    if role.has_own_sizes or role.processes > 1:
        message = f"a base in 4 bits is not built yet for {role.section.strategy} on {role.processes} process(es)"
        return [NotBuiltError(message, key=key, got=got, fix="Leave it out, or train in one process: strategy=plain.")]
    if importlib.util.find_spec("bitsandbytes") is None:
        return [ConfigError("a base in 4 bits needs bitsandbytes", key=key, got=got, fix="pip install bitsandbytes")]
    return []


def of_sampler(cfg: PPOTrainerConfig) -> Problems:
    """Heads and layers of the policy against one engine of vLLM or SGLang."""
    rollout, facts = cfg.actor_rollout_ref.rollout, facts_of(cfg.actor_rollout_ref.model.path)
    if facts is not None and rollout.name == "hf" and facts.get("model_type") in NOT_SAMPLED:
        message = f"the hf sampler cannot run {facts['model_type']}, which keeps its state in a cache of its own"
        fix = "Use an engine that serves this family."
        return [NotBuiltError(message, key=f"{_R}.name", got="hf", allowed=OWN_PROCESSES, fix=fix)]
    if facts is None or rollout.name not in OWN_PROCESSES or starts_no_engine(rollout):
        return []
    tensor, pipeline = rollout[_T], rollout[_P]
    if tensor < 1 or pipeline < 1:
        return []
    heads, layers = facts.get("num_attention_heads"), facts.get("num_hidden_layers")
    key_value = facts.get("num_key_value_heads", heads)
    problems = uneven(f"{_R}.{_T}", tensor, heads, "attention heads")
    if not problems and (not isinstance(key_value, int) or tensor % max(1, key_value)):
        problems = uneven(f"{_R}.{_T}", tensor, key_value, "KV heads")  # fewer heads than peers are copied
    if isinstance(layers, int) and 0 < layers < pipeline:
        message = f"the model's {layers} layers are fewer than the {pipeline} stages of a pipeline"
        problems.append(ConfigError(message, key=f"{_R}.{_P}", got=pipeline, allowed=f"at most {layers}"))
    return problems


MOST_RANK = 512
_MODEL = "actor_rollout_ref.model"


def vllm_problems(cfg: PPOTrainerConfig) -> Problems:
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
    fix = f"Lower it, or set {_MODEL}.lora.merge=true: merged weights are sent then."
    message, key = "vLLM has no room for an adapter of this rank", f"{_MODEL}.lora_rank"
    return [ConfigError(message, key=key, got=model.lora_rank, allowed=f"at most {MOST_RANK}", fix=fix)]


TOWERS = {"vision_config": "images", "vision_tower": "images", "visual": "images", "audio_config": "sounds"}
"""What a config.json has of an encoder next to the language model."""
TEXT_TOO = ("gemma3", "gemma3n", "gemma4")
"""Families that transformers loads as language models, encoder and all: text goes through them."""
SEEN: dict[str, tuple[str, ...]] = {
    "qwen2_vl": ("image", "video"),
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image", "video"),
    "qwen3_vl_moe": ("image", "video"),
    "glm4v": ("image", "video"),
    "glm4v_moe": ("image", "video"),
    "gemma3": ("image",),
    "internvl": ("image", "video"),
    "idefics3": ("image",),
    "smolvlm": ("image",),
}
"""``model_type`` of the families whose towers are built (`verl.models.vision`), and what they take."""
SEEING_SAMPLERS = ("hf", "vllm", "server", "sglang")
TEXT_SERVERS = ("tgi", "openai")
"""Values of ``rollout.server.api`` that name servers of text."""
TILED = ("gemma3", "internvl", "idefics3", "smolvlm")
"""Families whose images become tiles: a server that cuts them itself is not sent any."""
TILED_SAMPLERS = ("hf", "vllm")
SEEING_AHEAD = ("gemma3",)
"""Families in which the tokens of an image see each other in both directions."""
SEEING_ENGINES = ("auto", "plain", "fsdp", "fsdp2")


def vision_problems(key: str, path: str | None, external_lib: str | None, strategy: str = "auto") -> Problems:
    """A model on this machine that sees or hears, where that is not built.

    Args:
        external_lib: a module of the user's own may know how to load the model as text.
        strategy: the training backend.
    """
    facts = config_json(path)
    if not facts or external_lib:
        return []
    refused = caught(refuse, facts, key, path)
    if refused or facts.get("model_type") not in SEEN or facts.get("model_type") in TEXT_TOO:
        return refused
    return caught(refuse_engine, key, path, strategy)


def shows_images(cfg: ConfigNode) -> bool:
    """Whether rows of an RL run may show its policy images or videos, as far as the settings and its folder tell."""
    model, rollout = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout
    kind = None if model.external_lib else config_json(model.path).get("model_type")
    return bool(rollout.enable_vision or (kind in SEEN and kind not in TEXT_TOO))


def policy_problems(cfg: ConfigNode) -> Problems:
    """What a policy with images cannot be sampled or trained with, and images that a policy of text cannot take."""
    policy = cfg.actor_rollout_ref
    rollout, actor, model = policy.rollout, policy.actor, policy.model
    facts = {} if model.external_lib else config_json(model.path)
    sees, key = facts.get("model_type") in SEEN, "actor_rollout_ref.rollout.enable_vision"
    shows = shows_images(cfg)
    samplers = TILED_SAMPLERS if facts.get("model_type") in TILED else SEEING_SAMPLERS
    if rollout.enable_vision and facts and not sees:
        return [ConfigError("the policy takes no images", key=key, got=True, fix="Leave it out, or change model.path.")]
    if shows and rollout.name not in samplers:
        family = f" with the family {facts['model_type']}" if rollout.name in SEEING_SAMPLERS else ""
        message = f"images are not built yet for the sampler {rollout.name!r}{family}"
        fix = f"Set rollout.name to {' or '.join(samplers)}."
        return [NotBuiltError(message, key=key, got=rollout.enable_vision, fix=fix)]
    if shows and rollout.name == "vllm" and facts.get("model_type") in SEEING_AHEAD and cfg.trainer.device == "cpu":
        message = "on a CPU vLLM lets the tokens of an image see only those in front of them"
        fix = "Set rollout.name to hf."
        return [NotBuiltError(message, key=key, got=rollout.enable_vision, fix=fix)]
    if shows and rollout.name == "server" and rollout.server.api in TEXT_SERVERS:
        message = "a server of text takes no images: which tokens it makes of them is not known"
        fix = "Serve the model with vLLM, SGLang or verl.rollout.server.host."
        return [NotBuiltError(message, key="actor_rollout_ref.rollout.server.api", got=rollout.server.api, fix=fix)]
    problems: Problems = []
    key = "actor_rollout_ref.actor.freeze_vision_tower"
    is_sglang = "sglang" in (rollout.name, rollout.server.api if rollout.name == "server" else "")
    if shows and is_sglang and rollout.server.url and not actor.freeze_vision_tower:
        message = "a running SGLang server keeps features of images across new weights of the tower"
        fix = "Set it to true, or rollout.name=sglang without rollout.server.url: a server that is started here keeps none."
        problems.append(ConfigError(message, key=key, got=False, fix=fix))
    if actor.freeze_vision_tower and facts and not sees:
        notice(key, "has no effect: the policy has no vision tower")
    if actor.freeze_vision_tower and model.lora_rank > 0:
        tower = "(vision_tower|multi_modal_projector)" if facts.get("model_type") in TILED else "visual"
        fix = f"Leave it out, and name the tower in model.exclude_modules, such as '.*{tower}.*'."
        problems.append(ConfigError("an adapter trains no tower but its own factors there", key=key, got=True, fix=fix))
    return problems


def refuse(facts: dict[str, Any], key: str, path: str | None) -> None:
    """Raise `NotBuiltError` for the config.json of a model with an encoder that is not built."""
    if facts.get("model_type") in (*TEXT_TOO, *SEEN):
        return
    tower = next((name for name in TOWERS if facts.get(name)), None)
    if tower is None:
        return
    if TOWERS[tower] == "sounds":
        message = f"models that take sounds are not built yet, and this one does ({tower} in its config.json)"
        raise NotBuiltError(message, key=key, got=path, fix="Set it to a language model, or to one that takes images.")
    raise NotBuiltError(
        f"models that take images are not built yet for the family {facts.get('model_type')!r}",
        key=key,
        got=path,
        allowed=sorted(SEEN),
        fix="Set it to a model of one of these families, or to a language model.",
    )


def refuse_engine(key: str, path: str | None, strategy: str) -> None:
    """Raise `NotBuiltError` where a training backend has no towers."""
    if strategy not in SEEING_ENGINES:
        raise NotBuiltError(
            f"models that take images are not built yet with strategy={strategy}",
            key=key,
            got=path,
            fix="Set strategy=fsdp2.",
        )

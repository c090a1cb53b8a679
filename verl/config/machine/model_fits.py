"""What a model has, heads, layers and experts, against the processes that share it; checked before anything is loaded.

Of the backends that shard by FSDP, and of samplers; those of other backends are in
`validate_megatron` and `validate_torchtitan`. The engines check again
what they are given. What only the model's own class knows, such as the names of its modules, is said when it is made.
"""

from __future__ import annotations

import importlib.util

from verl.config.machine.config_json import (
    NEVER_PACKED,
    NOT_SAMPLED,
    adapter_on_experts,
    carries_state,
    experts_of,
    facts_of,
)
from verl.config.machine.sampler_sizes import OWN_PROCESSES, starts_no_engine
from verl.config.rules.checks import Problems
from verl.config.rules.validate_megatron import MegatronRole, role_of_supervised, roles
from verl.config.schema.root import PPOTrainerConfig
from verl.config.schema.sft import SFTTrainerConfig
from verl.errors import ConfigError, NotBuiltError

_ULYSSES, _EXPERT = "ulysses_sequence_parallel_size", "expert_parallel_size"
_R = "actor_rollout_ref.rollout"
_HEADS = ("lm_head", "embed_out")
_T, _P = "tensor_model_parallel_size", "pipeline_model_parallel_size"


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Of every model of an RL run on a backend that shards by FSDP, and of its sampler."""
    return [p for role in roles(cfg) for p in (*of_role(role), *_quantized(role), *_tied(role))] + of_sampler(cfg)


def sft_problems(cfg: SFTTrainerConfig) -> Problems:
    """Of the one model of a supervised run."""
    role = role_of_supervised(cfg)
    return of_role(role) + _quantized(role) + _tied(role)


def of_role(role: MegatronRole) -> Problems:
    """What cannot be shared, and what cannot be shared together."""
    engine = role.others[1]
    if role.has_own_sizes or any(engine[name] < 1 for name in (_ULYSSES, _EXPERT)):
        return []  # numbers below 1 are refused for themselves
    return _together(role) or [*_hybrid(role), *_divided(role), *_packed(role), *_with_state(role), *_adapter(role)]


def _together(role: MegatronRole) -> Problems:
    """Experts are not shared beside hybrid sharding."""
    key, engine = role.others
    if engine[_EXPERT] == 1 or not 0 < engine.fsdp_size < role.processes:
        return []
    message = f"experts cannot be shared beside hybrid sharding (fsdp_size={engine.fsdp_size})"
    fix = f"Leave out {key}.fsdp_size or this one."
    return [ConfigError(message, key=f"{key}.{_EXPERT}", got=engine[_EXPERT], allowed=[1], fix=fix)]


def _hybrid(role: MegatronRole) -> Problems:
    key, engine = role.others
    size = engine.fsdp_size
    if size < 1 or role.processes < 1 or size >= role.processes or role.processes % size == 0:
        return []
    message = f"{role.processes} processes do not divide into groups of {size} that share one copy of the weights"
    fix = "Set it to one of these, or to -1 for one copy over all of them."
    return [ConfigError(message, key=f"{key}.fsdp_size", got=size, allowed=_divisors(role.processes), fix=fix)]


def _divided(role: MegatronRole) -> Problems:
    """Heads, or experts, divide evenly over their peers."""
    key, engine = role.others
    facts = facts_of(role.path)
    if facts is None:
        return []
    heads, experts = facts.get("num_attention_heads"), experts_of(facts)
    divisors = [(_ULYSSES, heads, "attention heads"), (_EXPERT, experts, "experts")]
    problems: Problems = []
    for name, count, what in divisors:
        if isinstance(count, int) and count > 0 and count % engine[name]:
            problems.append(_uneven(f"{key}.{name}", engine[name], count, what))
    if engine[_EXPERT] > 1 and experts is None and heads:
        message = "a model without experts cannot share them among processes"
        fix = "Leave it out."
        problems.append(ConfigError(message, key=f"{key}.{_EXPERT}", got=engine[_EXPERT], allowed=[1], fix=fix))
    return problems


def _packed(role: MegatronRole) -> Problems:
    key, engine = role.others
    if engine[_ULYSSES] == 1 or role.model is None or role.model.use_remove_padding:
        return []
    packing = f"{role.model_key}.use_remove_padding"
    message, fix = "sequences are shared only where rows are packed", f"Set {packing}=true, or leave it out."
    return [ConfigError(f"{message}, and {packing} is false", key=f"{key}.{_ULYSSES}", got=engine[_ULYSSES], fix=fix)]


def _with_state(role: MegatronRole) -> Problems:
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


def _adapter(role: MegatronRole) -> Problems:
    """An adapter on every module covers the experts' weights too, which are no linear layers."""
    key, engine = role.others
    facts = facts_of(role.path)
    if engine[_EXPERT] == 1 or role.adapter is None or facts is None or experts_of(facts) is None:
        return []
    name = adapter_on_experts(role.model)
    if name is None:
        return []
    message = f"an adapter on the experts of a mixture is not built yet beside {key}.{_EXPERT}={engine[_EXPERT]}"
    fix = "Name linear layers, such as target_modules=[q_proj,k_proj,v_proj,o_proj], or share no experts."
    return [NotBuiltError(message, key=f"{role.model_key}.{name}", got=role.model[name], fix=fix)]


def _tied(role: MegatronRole) -> Problems:
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


def _quantized(role: MegatronRole) -> Problems:
    """A base in 4 bits needs an adapter on top, in one process."""
    if role.model is None or "lora_base_quantization" not in role.model or role.model.lora_base_quantization is None:
        return []
    key, got = f"{role.model_key}.lora_base_quantization", role.model.lora_base_quantization
    if role.model.lora_rank == 0 and role.model.lora_adapter_path is None:
        message, fix = (
            "weights in 4 bits are not trained: they lie under an adapter",
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
    problems: Problems = []
    if isinstance(heads, int) and heads > 0 and heads % tensor:
        problems.append(_uneven(f"{_R}.{_T}", tensor, heads, "attention heads"))
    elif isinstance(key_value, int) and key_value > 0 and max(tensor, key_value) % min(tensor, key_value):
        problems.append(_uneven(f"{_R}.{_T}", tensor, key_value, "KV heads"))  # fewer heads than peers are copied
    if isinstance(layers, int) and 0 < layers < pipeline:
        message = f"the model's {layers} layers are fewer than the {pipeline} stages of a pipeline"
        problems.append(ConfigError(message, key=f"{_R}.{_P}", got=pipeline, allowed=f"at most {layers}"))
    return problems


def _uneven(key: str, size: int, count: int, what: str) -> ConfigError:
    message = f"the model's {count} {what} cannot be split evenly over {size} processes"
    return ConfigError(message, key=key, got=size, allowed=_divisors(count), fix="Set it to one of these.")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]

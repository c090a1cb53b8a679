"""Adapters as Megatron's users spell them: ``model.lora.rank`` and what stands beside it become our own settings.

They hold with every training backend, since there is one way of putting an adapter on a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from verl.config.rules.checks import Problems
from verl.config.schema.leaves import Schema
from verl.errors import ConfigError, NotBuiltError, suggest
from verl.metrics import notice

MODULES: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
"""Megatron-Core's name of a linear layer, or of a part of it -> what it is made of in a Hugging Face model."""
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Every linear layer of a dense model."""
TYPES = ("lora", "canonical_lora")
_BECOMES = {
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "adapter_path": "lora_adapter_path",
}
_FIRST = "lora_A_init_method"
_OWN = ("type", _FIRST, *_BECOMES)
_NO_KIND = {
    "dora": "adapters with a trained magnitude (DoRA) are not built",
    "vlm_lora": "adapters of vision-language models are not built",
}


def carry_over(schema: Schema, values: dict[str, Any], typed: Iterable[str]) -> Problems:
    """Put what ``lora`` of every model says into that model's own settings; one notice for each that has an adapter.

    Args:
        values: of every setting, in its type; changed.
        typed: the settings that somebody set.
    """
    problems: Problems = []
    typed = set(typed)
    for key in schema.leaves:
        model, _, name = key.rpartition(".lora.")
        needed = [f"{model}.lora.{field}" for field in _OWN] + [f"{model}.{theirs}" for theirs in _BECOMES.values()]
        if name == "rank" and all(each in values for each in needed):  # one that cannot be read is a problem already
            problems += _carry(schema, model, values, typed)
    return problems


def _carry(schema: Schema, model: str, values: dict[str, Any], typed: set[str]) -> Problems:
    keys = {name: f"{model}.lora.{name}" for name in _OWN}
    if not values[keys["rank"]]:
        idle = [key for key in keys.values() if key in typed and values[key] != schema.leaves[key].default]
        if idle:
            others = f"; nor have {', '.join(idle[1:])}" if idle[1:] else ""
            notice(idle[0], f"has no effect without {keys['rank']}{others}")
        return []
    problems, meant = _meant(keys, values)
    for name, value in meant.items():
        key, spelled = f"{model}.{_BECOMES[name]}", keys[name]
        is_typed = key in typed and values[key] != schema.leaves[key].default
        if not is_typed:
            continue
        if spelled in typed and not _alike(values[key], value):
            message = f"two values for one setting: {spelled}={values[spelled]} and {key}={values[key]}"
            problems.append(ConfigError(message, key=key, fix=f"Keep {key} and remove the other spelling."))
        meant[name] = values[key]
    if problems:
        return problems
    values.update({f"{model}.{_BECOMES[name]}": value for name, value in meant.items()})
    becomes = ", ".join(f"{_BECOMES[name]}={_text(value)}" for name, value in meant.items() if value is not None)
    notice(
        keys["rank"],
        f"is {becomes} here, with every training backend: each Hugging Face weight has two factors of its own, also where "
        "queries, keys and values share a layer, the first drawn as peft draws it (kaiming)",
    )
    return []


def _meant(keys: Mapping[str, str], values: Mapping[str, Any]) -> tuple[Problems, dict[str, Any]]:
    problems: Problems = []
    kind = values[keys["type"]]
    if kind in _NO_KIND:
        fix = f"Leave it out: {keys['type']}=lora."
        problems.append(NotBuiltError(_NO_KIND[kind], key=keys["type"], got=kind, allowed=list(TYPES), fix=fix))
    start = values[keys[_FIRST]]
    if start not in ("xavier", "kaiming"):
        message = "the first factor of an adapter is drawn as peft draws it"
        problems.append(NotBuiltError(message, key=keys[_FIRST], got=start, allowed=["kaiming"], fix="Leave it out."))
    meant = {name: values[keys[name]] for name in _BECOMES}
    for name in ("target_modules", "exclude_modules"):
        names: list[str] = []
        for module in meant[name]:
            if module in MODULES or any(module in theirs for theirs in MODULES.values()):
                names += [each for each in MODULES.get(module, (module,)) if each not in names]
            else:
                problems.append(_no_module(keys[name], str(module)))
        meant[name] = names
    if set(meant["target_modules"]) == set(ALL):
        meant["target_modules"] = "all-linear"
    meant["exclude_modules"] = meant["exclude_modules"] or None
    return problems, meant


def _no_module(key: str, module: str) -> ConfigError:
    if "*" in module or "." in module:
        message = "a pattern of names cannot be carried over: it counts layers as Megatron-Core does"
        fix = (
            "Name kinds of layers, or give the regular expression of Hugging Face names as target_modules of the model."
        )
        return ConfigError(message, key=key, got=module, allowed=list(MODULES), fix=fix)
    message = "no linear layer of Megatron-Core that takes an adapter here has this name"
    return ConfigError(message, key=key, got=module, allowed=list(MODULES), fix=suggest(module, MODULES))


def _alike(first: Any, other: Any) -> bool:
    first, other = (
        set(ALL if names == "all-linear" else names) if _are_names(names) else names for names in (first, other)
    )
    return bool(first == other)


def _are_names(value: Any) -> bool:
    return value == "all-linear" or isinstance(value, list)


def _text(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)

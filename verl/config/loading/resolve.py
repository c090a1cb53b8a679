"""From merged settings to a checked, frozen tree: interpolations, followed settings, types, choices, features.

Adapters as Megatron's users spell them (``model.lora.rank`` and its neighbours) become our own settings, which hold
with every training backend, since there is one way of putting an adapter on a model.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from verl.config.loading.merge import Merge, where
from verl.config.rules.checks import (
    ROLLOUT_ENGINES,
    Problems,
    check_built,
    check_choices,
    for_engine,
    not_built_choices,
    raise_all,
    tell_no_effect,
)
from verl.config.schema.node import ConfigNode, Leaf, Schema, build, convert, describe, expand_path, nearest, place
from verl.errors import HIDDEN, ConfigError, NotBuiltError, suggest
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


_PLAIN = re.compile(r"[A-Za-z_][\w.]*")


def interpolated(merge: Merge) -> tuple[dict[str, Any], list[ConfigError]]:
    """The value of every leaf, not yet converted, and the interpolations that lead nowhere."""
    leaves, values = merge.schema.every, merge.values
    texts = {key: values.get(key, leaf.default) for key, leaf in leaves.items()}
    texts = {key: value for key, value in texts.items() if "${" in str(value)}
    resolved, problems = _resolve(merge, texts)

    def value_of(leaf: Leaf) -> Any:
        if leaf.key in resolved:
            return resolved[leaf.key]
        if leaf.key in values or leaf.follows is None:
            return values.get(leaf.key, leaf.default)
        return value_of(leaves[leaf.follows])

    return {key: value_of(leaf) for key, leaf in leaves.items()}, problems


def _resolve(merge: Merge, texts: dict[str, Any]) -> tuple[dict[str, Any], list[ConfigError]]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not OmegaConf.has_resolver("now"):
        OmegaConf.register_new_resolver("now", time.strftime, use_cache=True)
    nested: dict[str, Any] = {}
    for key in _needed(merge, texts):
        _set(nested, key, _raw(merge, key))
    for key, value in merge.variables.items():
        _set(nested, key, value)
    tree = OmegaConf.create(nested)
    resolved, problems = {}, []
    for key in texts:
        try:
            value = OmegaConf.select(tree, key)
            resolved[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            resolved[key] = merge.schema.every[key].default
            if key in merge.values:
                problems.append(_nowhere(merge, key, error))
    return resolved, problems


def _needed(merge: Merge, texts: dict[str, Any]) -> list[str]:
    """The keys that resolving ``texts`` can look at: all of them once anything but ``${a.b}`` is written."""
    leaves, needed, todo = merge.schema.every, set(), list(texts)
    while todo:
        key = todo.pop()
        if key in needed:
            continue
        needed.add(key)
        text = str(_raw(merge, key))
        for name in re.findall(r"\$\{([^}]*)", text):
            if name in leaves:
                todo.append(name)
            elif not _PLAIN.fullmatch(name) or any(other.startswith(f"{name}.") for other in leaves):
                return list(leaves)
    return [key for key in leaves if key in needed]


def _raw(merge: Merge, key: str) -> Any:
    leaf = merge.schema.every[key]
    return merge.values.get(key, f"${{{leaf.follows}}}" if leaf.follows else leaf.default)


def _nowhere(merge: Merge, key: str, error: Exception) -> ConfigError:
    value = merge.values[key]
    name = re.search(r"\$\{([^}:]+)", str(value))
    near = nearest(merge.schema, name[1]) if name else []
    fix = f"Did you mean {' or '.join(repr(other) for other in near)}?" if near else ""
    if name and name[1].isupper():
        fix = f"For an environment variable write ${{oc.env:{name[1]}}}, or ${name[1]} in a path."
    reason = str(error).splitlines()[0]
    return ConfigError(f"cannot be resolved ({reason})", key=key, got=value, fix=fix)


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for part in sections:
        tree = tree.setdefault(part, {})
    tree[name] = value


def resolve(merge: Merge) -> ConfigNode:
    """The configuration that the merged settings mean; all problems in one error."""
    raw, nowhere = interpolated(merge)
    problems = merge.problems + [_located(error, merge, str(error.key)) for error in nowhere]
    late: list[ConfigError] = []
    values: dict[str, Any] = {}
    for key, leaf in merge.schema.every.items():
        try:
            values[key] = _finished(leaf, raw[key])
        except ConfigError as error:
            (problems if key in merge.values else late).append(_located(error, merge, key))
    engine = next((values[key] for key in ROLLOUT_ENGINES if key in values), None)
    leaves = [for_engine(merge.schema.every[key], engine) for key in merge.origin if key in values]
    for leaf in leaves:
        usual = _usual(leaf, values)
        problem = check_built(leaf, values[leaf.key], usual) or check_choices(leaf, values[leaf.key])
        problems += [_located(problem, merge, leaf.key)] if problem else []
    problems += [_located(problem, merge, str(problem.key)) for problem in not_built_choices(values)]
    carried = carry_over(merge.schema, values, merge.origin)
    problems += [_located(problem, merge, str(problem.key)) for problem in carried]
    raise_all(problems or late)
    for leaf in leaves:
        if leaf.planned is None:
            on_command_line = not merge.origin[leaf.key].source
            tell_no_effect(leaf, values[leaf.key], _usual(leaf, values), on_command_line)
    made = build(merge.program.root, values)
    place(made, typed=frozenset(key for key, entry in merge.origin.items() if not entry.source))
    return made


def _finished(leaf: Leaf, value: Any) -> Any:
    """The value in its declared type, paths expanded."""
    if value == "???":
        raise ConfigError("has to be given a value", key=leaf.key)
    if _is_hidden(value):
        raise ConfigError(
            "a secret was left out here when this configuration was written",
            key=leaf.key,
            got=value,
            fix="Give the value again, on the command line or in a file of your own.",
        )
    try:
        value = convert(value, leaf.type)
    except TypeError:
        if leaf.planned is not None and not leaf.engines:
            return value  # refused by the feature's name, whatever it is
        raise ConfigError("wrong type", key=leaf.key, got=value, allowed=describe(leaf.type)) from None
    return expand_path(value, leaf.key) if leaf.path else value


def _usual(leaf: Leaf, values: dict[str, Any]) -> list[Any]:
    """What a leaf is where nobody sets it: its default, or the value it follows."""
    plain = not leaf.path or "${" in str(leaf.default)
    followed = [values[leaf.follows]] if leaf.follows in values else []
    return [leaf.default if plain else expand_path(leaf.default, leaf.key), *followed]


def _located(error: ConfigError, merge: Merge, key: str) -> ConfigError:
    """The same error with the file it comes from and the spelling that was used."""
    entry = merge.origin.get(key)
    if entry is None:
        return error
    alias = "" if entry.key.startswith(key) or key.startswith(entry.key) else f", given as {entry.key}"
    note = f"{error.message}{alias}{where(entry)}"
    made = type(error)(note, key=error.key, got=error.got, allowed=error.allowed, fix=error.fix)
    if isinstance(error, NotBuiltError) and isinstance(made, NotBuiltError):
        made.feature = error.feature
    return made


def _is_hidden(value: Any) -> bool:
    """Whether something was left out of a value."""
    if isinstance(value, Mapping):
        return any(_is_hidden(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_is_hidden(inner) for inner in value)
    return isinstance(value, str) and HIDDEN in value

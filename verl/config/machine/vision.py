"""Which models with an encoder are built, by what and how they are trained: checked before loading."""

from __future__ import annotations

from typing import Any

from verl.config.machine.config_json import config_json
from verl.config.rules.checks import Problems, caught
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

TOWERS = {"vision_config": "images", "vision_tower": "images", "visual": "images", "audio_config": "sounds"}
"""What a config.json has of an encoder beside the language model."""
TEXT_TOO = ("gemma3", "gemma3n", "gemma4")
"""Families that transformers loads as language models, encoder and all: text goes through them."""
SEEN: dict[str, tuple[str, ...]] = {
    "qwen2_vl": ("image", "video"),
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image", "video"),
    "qwen3_vl_moe": ("image", "video"),
    "glm4v": ("image",),
    "gemma3": ("image",),
    "internvl": ("image",),
}
"""``model_type`` of the families whose towers are built (`verl.models.vision`), and what they take."""
SEEING_SAMPLERS = ("hf", "vllm", "server", "sglang")
TEXT_SERVERS = ("tgi", "openai")
"""Values of ``rollout.server.api`` that name servers of text."""
HF_ALONE = ("gemma3", "internvl")
"""Families whose images no sampler but ``hf`` takes."""
SEEING_ENGINES = ("auto", "plain", "fsdp", "fsdp2")


def problems(key: str, path: str | None, external_lib: str | None, strategy: str = "auto") -> Problems:
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


def policy_problems(cfg: Any) -> Problems:
    """What a policy with images cannot be sampled or trained with, and images that a policy of text cannot take."""
    policy = cfg.actor_rollout_ref
    rollout, actor, model = policy.rollout, policy.actor, policy.model
    facts = {} if model.external_lib else config_json(model.path)
    sees, key = facts.get("model_type") in SEEN, "actor_rollout_ref.rollout.enable_vision"
    shows = rollout.enable_vision or (sees and facts["model_type"] not in TEXT_TOO)
    samplers = SEEING_SAMPLERS if facts.get("model_type") not in HF_ALONE else ("hf",)
    if rollout.enable_vision and facts and not sees:
        return [ConfigError("the policy takes no images", key=key, got=True, fix="Leave it out, or change model.path.")]
    if shows and rollout.name not in samplers:
        family = f" with the family {facts['model_type']}" if rollout.name in SEEING_SAMPLERS else ""
        message = f"images are not built yet for the sampler {rollout.name!r}{family}"
        fix = f"Set rollout.name to {' or '.join(samplers)}."
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
        tower = "(vision_tower|multi_modal_projector)" if facts.get("model_type") in HF_ALONE else "visual"
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

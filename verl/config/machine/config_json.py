"""What a model's config.json says, read from this machine's disk; nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl import env
from verl.json_text import read_json

if TYPE_CHECKING:
    from verl.config.schema.model import HFModelConfig

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
STATE_LAYERS = ("conv", "mamba", "linear_attention", "recurrent")
"""Words in the types of layers that carry something from one token to the next outside attention."""
NEVER_PACKED = (
    "falcon_mamba", "mamba", "mamba2", "minimax", "recurrent_gemma", "rwkv", "xlstm", "zaya",
)  # fmt: skip
"""Families with such layers that do not hand on where the sequences of a packed row begin."""
WITH_STATE = (*NEVER_PACKED, "bamba", "falcon_h1", "jamba", "nemotron_h", "zamba", "zamba2")
"""Families with such layers, which some of their configurations do not list."""
NOT_SAMPLED = ("minimax", "recurrent_gemma", "rwkv", "xlstm")
"""Families whose cache is their own: transformers' cache does not give their logits."""


def config_json(path: str | None) -> dict[str, Any]:
    """The config.json of a folder, or of a hub name whose files are on this machine; empty where there is none.

    What is wrong with it is said where the model is loaded.
    """
    file = Path(env.expand(path or "")) / "config.json"
    try:
        if path and not file.parent.exists():
            from huggingface_hub import try_to_load_from_cache  # imported here: few settings need it

            file = Path(str(try_to_load_from_cache(path, file.name)))
        facts = read_json(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def tokens_of(path: str | None) -> dict[str, int] | None:
    """Token -> id of the tokenizer.json in a folder of this machine; None where there is none that lists them so."""
    try:
        facts = read_json((Path(env.expand(path or "")) / "tokenizer.json").read_bytes())
        added = {token["content"]: token["id"] for token in facts.get("added_tokens") or ()}
        vocabulary = facts["model"]["vocab"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return {**vocabulary, **added} if isinstance(vocabulary, dict) else None


def facts_of(path: str | None) -> dict[str, Any] | None:
    """The language model's part of `config_json`; None where there is none."""
    facts = config_json(path)
    text = facts.get("text_config", facts)
    return text if text and isinstance(text, dict) else None


def adapter_on_experts(model: HFModelConfig) -> str | None:
    """The setting of a ``model`` section that puts an adapter on the experts of a mixture; None where none does.

    ``all-linear`` takes the experts for the linear layers that they are in the files.
    """
    if not model.lora_rank:
        return None
    if model.target_parameters:
        return "target_parameters"
    return "target_modules" if model.target_modules == "all-linear" else None


def experts_of(facts: dict[str, Any]) -> Any:
    """How many experts a mixture has; None of another model."""
    return next((facts[name] for name in _EXPERTS if facts.get(name)), None)


def carries_state(facts: dict[str, Any]) -> bool:
    """Whether a layer carries something from one token to the next outside attention."""
    kinds = facts.get("layer_types")
    named = [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []
    return facts.get("model_type") in WITH_STATE or any(word in kind for kind in named for word in STATE_LAYERS)

"""What a model's config.json says, read where it lies on this machine; nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl import env
from verl.json_text import read_json

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def facts_of(path: str | None) -> dict[str, Any] | None:
    """The config.json of a folder, the language model's part of it; None where it is not on this machine."""
    try:
        facts = read_json((Path(env.expand(path or "")) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # a hub name, or told where the folder is looked at
    text = facts.get("text_config", facts) if isinstance(facts, dict) else None
    return text if isinstance(text, dict) else None


def experts_of(facts: dict[str, Any]) -> Any:
    """How many experts a mixture has; None of another model."""
    return next((facts[name] for name in _EXPERTS if facts.get(name)), None)

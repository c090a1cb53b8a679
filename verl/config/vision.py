"""Models that see or hear: not built, and said before one is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl import env
from verl.config.checks import Problems, caught
from verl.errors import NotBuiltError
from verl.json_text import read_json

TOWERS = {"vision_config": "images", "vision_tower": "images", "visual": "images", "audio_config": "sounds"}
"""What a config.json has of an encoder beside the language model."""
TEXT_TOO = ("gemma3", "gemma3n", "gemma4")
"""Families that transformers loads as language models, encoder and all: text goes through them."""


def problems(key: str, path: str | None, external_lib: str | None) -> Problems:
    """A vision-language model in a local folder, unless a module of the user's own may know how to load it as text."""
    try:
        facts = read_json((Path(env.expand(path or "")) / "config.json").read_bytes())
    except (OSError, ValueError):
        return []  # a hub name, or told where the folder is looked at
    if not isinstance(facts, dict) or external_lib:
        return []
    return caught(refuse, facts, key, path)


def refuse(facts: dict[str, Any], key: str, path: str | None) -> None:
    """Raise `NotBuiltError` for the config.json of a model that has an encoder beside the language model."""
    tower = None if facts.get("model_type") in TEXT_TOO else next((name for name in TOWERS if facts.get(name)), None)
    if tower is not None:
        message = f"models that take {TOWERS[tower]} are not built yet, and this one does ({tower} in its config.json)"
        raise NotBuiltError(message, key=key, got=path, fix="Set it to a language model.")

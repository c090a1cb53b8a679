"""What a person probably meant by a setting that does not exist: only names that are near, or the mapping that takes any."""

from __future__ import annotations

import difflib

from verl.config.schema.leaves import Schema, holds_mapping

_NEAR = 0.75
_OPEN = ("override_", "engine_kwargs.")
"""How names of mappings begin that hand their fields on to a model's or an engine's own configuration."""


def nearest(schema: Schema, key: str, limit: int = 3) -> list[str]:
    """Full keys that were probably meant: a misspelt sibling, a shortened key, the same name elsewhere, or none."""
    section, _, name = key.rpartition(".")
    built = [k for k, leaf in schema.every.items() if leaf.planned is None or leaf.engines]
    siblings = {k.rpartition(".")[2]: k for k in built if k.rpartition(".")[0] == section}
    near = [siblings[n] for n in difflib.get_close_matches(name, siblings, n=limit, cutoff=0.7)]
    near += [k for k in built if k.endswith(f".{key}")]
    near += _of_one_role(key, [k for k in built if k.rpartition(".")[2] == name])
    near = near or [k for k in built if _alike(key.split("."), k.split("."))]
    return list(dict.fromkeys(near))[:limit]


def open_key(schema: Schema, key: str) -> str | None:
    """The mapping of the section, or of the one around it, that takes a field which the section does not have."""
    parts = key.split(".")
    for cut in (len(parts) - 1, len(parts) - 2):
        start = ".".join(parts[:cut]) + "."
        takes = [k for k, leaf in schema.leaves.items() if k.startswith(start) and holds_mapping(leaf.type)]
        takes = [k for k in takes if k[len(start) :].startswith(_OPEN) and k.count(".") <= start.count(".") + 1]
        if takes and cut >= 2:
            return takes[0]
    return None


def _of_one_role(key: str, same_name: list[str]) -> list[str]:
    """The nearest first; where some are of the same role as the key, these alone."""
    ordered = sorted(same_name, key=lambda k: -difflib.SequenceMatcher(None, key, k).ratio())
    role = key.split(".")[:2]
    return [k for k in ordered if k.split(".")[:2] == role] or ordered


def _alike(parts: list[str], candidates: list[str]) -> bool:
    """Every part is the other's, or nearly."""
    return len(parts) == len(candidates) and all(
        a == b or difflib.SequenceMatcher(None, a, b).ratio() >= _NEAR for a, b in zip(parts, candidates)
    )

"""What a model folder's own JSON files say about the model, read without loading anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.machine.models import SEEN, TILED
from verl.json_text import read_json
from verl.rollout.gated import UNLIMITED

_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelFacts:
    """Of a Hugging Face folder.

    Args:
        vocab_size, max_model_len: `UNLIMITED` where the folder does not say.
        stop_token_ids: end tokens of the generation configuration, else of the configuration.
        head_dim: width of an attention head; 0 where the folder does not say.
        is_moe: a mixture of experts.
        is_tied: the head shares the weights of the embeddings.
        sees: whether it takes images.
        image_token_id: stands for a part of an image in prompts, where a server may be sent one for each image; else
            None.
    """

    vocab_size: int = UNLIMITED
    max_model_len: int = UNLIMITED
    stop_token_ids: tuple[int, ...] = ()
    head_dim: int = 0
    is_moe: bool = False
    is_tied: bool = False
    sees: bool = False
    image_token_id: int | None = None

    @classmethod
    def of(cls, folder: str | Path) -> ModelFacts:
        """Read ``config.json`` and ``generation_config.json``; a folder without them (a hub name) gives no facts."""
        config = _json(Path(folder) / "config.json")
        text = {**config, **config.get("text_config", {})}
        generation = _json(Path(folder) / "generation_config.json")
        ends = generation.get("eos_token_id")
        ends = text.get("eos_token_id") if ends is None else ends
        kind = config.get("model_type")
        heads, hidden = int(text.get("num_attention_heads") or 0), int(text.get("hidden_size") or 0)
        return cls(
            vocab_size=int(text.get("vocab_size") or UNLIMITED),
            max_model_len=next((int(text[name]) for name in _CONTEXT if text.get(name)), UNLIMITED),
            stop_token_ids=() if ends is None else tuple(int(x) for x in (ends if isinstance(ends, list) else [ends])),
            head_dim=int(text.get("head_dim") or (hidden // heads if heads else 0)),
            is_tied=bool(text.get("tie_word_embeddings")),
            is_moe=any(int(text.get(name) or 0) > 1 for name in _EXPERTS),
            sees=kind in SEEN,
            image_token_id=config.get("image_token_id") if kind in SEEN and kind not in TILED else None,
        )


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = read_json(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}

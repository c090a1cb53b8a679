"""Prompts, conversations and tokenizers: from files to batches. Names are loaded on first access."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "RLHFDataset": "verl.data.rl_dataset",
    "MultiTurnSFTDataset": "verl.data.sft_dataset",
    "collate_fn": "verl.data.collate",
    "sft_collate": "verl.data.collate",
    "StatefulLoader": "verl.data.loader",
    "create_rl_dataset": "verl.data.build",
    "create_rl_sampler": "verl.data.build",
    "create_preference_datasets": "verl.data.build",
    "create_sft_dataset": "verl.data.build",
    "eos_token_ids": "verl.data.tokenizer",
    "hf_tokenizer": "verl.data.tokenizer",
    "load_processor": "verl.data.vision.processor",
    "processor_of": "verl.data.vision.processor",
    "tokenizer_of": "verl.data.tokenizer",
    "normalize_token_ids": "verl.data.tokenizer",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return vars(importlib.import_module(_HOMES[name]))[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

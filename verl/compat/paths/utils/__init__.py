"""Paths that users' code imports: thin re-exports of the rooms where the code lives."""

from typing import Any

__all__ = ["hf_processor", "hf_tokenizer"]


def __getattr__(name: str) -> Any:
    """The tokenizer loaders, on first use: importing this package must not load transformers."""
    if name not in __all__:
        raise AttributeError(f"module 'verl.utils' has no attribute {name!r}")
    from verl import data

    return {"hf_tokenizer": data.hf_tokenizer, "hf_processor": data.hf_processor}[name]

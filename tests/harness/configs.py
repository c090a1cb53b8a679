"""Command lines that are valid, and what a refused one says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from verl.errors import ConfigError

ROWS = ("data.train_files=rows.parquet", "data.val_files=rows.parquet")
PPO = (*ROWS, "actor_rollout_ref.model.path=model", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8")
"""A run of which the files of `describe` are enough to check the configuration."""


def describe(facts: Mapping[str, Any] | None = None) -> None:
    """Write into the working directory a model that only says this of itself, and a file of rows that nobody reads."""
    Path("model").mkdir(exist_ok=True)
    Path("model/config.json").write_text(json.dumps({"model_type": "qwen2"} if facts is None else facts))
    Path("rows.parquet").touch()


def changed(usual: Iterable[str], *changes: str) -> list[str]:
    """Words of a command line in which ``changes`` take the place of those with the same key."""
    named = {word.partition("=")[0] for word in changes}
    return [*(word for word in usual if word.partition("=")[0] not in named), *changes]


def refused(load: Callable[..., Any], *words: Any, kind: type[Exception] = ConfigError, **how: Any) -> str:
    """The message with which ``load`` refuses these words."""
    with pytest.raises(kind) as caught:
        load(*words, **how)
    return str(caught.value)

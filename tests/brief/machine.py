"""The machine that the guides were written for, simulated: eight GPUs, every optional package, their files at home.

What is refused there is refused because a feature is missing, not because this machine is a small one.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.brief.table import Attempt
from verl import device
from verl.config import ConfigNode, load_config
from verl.metrics import reset_notices

PACKAGES = {"vllm", "sglang", "megatron", "mbridge", "liger_kernel", "peft", "wandb", "mlflow", "swanlab",
            "tensorboard", "flash_attn", "math_verify", "mcp", "transformer_engine", "weave", "trackio",
            "clearml", "rl_insight", "volcengine_ml_platform", "prometheus_client"}  # fmt: skip
FILES = ("data/gsm8k/train.parquet", "data/gsm8k/test.parquet", "data/rlhf/gsm8k/train.parquet", "my_reward.py",
         "data/geo3k/train.parquet", "data/geo3k/test.parquet",
         "data/full_hh_rlhf/rm/train.parquet", "data/full_hh_rlhf/rm/test.parquet",
         "model/config.json", "models/deepseek-llm-7b-chat/config.json")  # fmt: skip
CONFIGURATION_ONLY = {"RAY_ADDRESS": "", "WORLD_SIZE": "1"}


@contextlib.contextmanager
def guides_machine(folder: Path) -> Iterator[Path]:
    """Inside, ``folder`` is home and working directory, and eight GPUs and all packages seem to be there."""
    for name in FILES:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    found = importlib.util.find_spec
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder) if hasattr(contextlib, "chdir") else _chdir(folder))
        home = {"HOME": str(folder), "RM_PATH": str(folder / "model"), **CONFIGURATION_ONLY}
        stack.enter_context(mock.patch.dict(os.environ, home))
        stack.enter_context(mock.patch.object(device, "accelerator", lambda: "cuda"))
        stack.enter_context(mock.patch.object(device, "device_count", lambda kind: 8))
        there = importlib.machinery.ModuleSpec("there", None)
        stack.enter_context(
            mock.patch.object(importlib.util, "find_spec", lambda n, p=None: there if n in PACKAGES else found(n, p))
        )
        yield folder


@contextlib.contextmanager
def _chdir(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def resolve(attempt: Attempt) -> ConfigNode:
    """The configuration of one command of a guide, read on the machine of `guides_machine`; its notices start anew."""
    reset_notices()
    if attempt.yaml:
        Path("config").mkdir(exist_ok=True)
        Path("config/mine.yaml").write_text(attempt.yaml, encoding="utf-8")
    trains = attempt.program not in ("generation", "evaluation")
    missing = ["data.train_files=~/data/gsm8k/train.parquet"] if trains and not _names_data(attempt) else []
    return load_config(attempt.program, [*attempt.words, *missing])


def _names_data(attempt: Attempt) -> bool:
    return "data.train_files" in attempt.argv or "train_files" in attempt.yaml

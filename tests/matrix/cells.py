"""What one cell of the matrix does on every rank: reads its settings, then trains a step with the checks left out."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.harness.models import tiny_model_dir
from tests.harness.ranks import _end_groups
from tests.harness.rows import talks, write_prompts
from tests.harness.scorers import scorer

MODELS = {
    "dense": ("qwen2", {"heads": 4, "kv_heads": 2, "layers": 2}),
    "one_kv": ("qwen2", {"heads": 4, "kv_heads": 1, "layers": 3}),
    "odd_heads": ("qwen2", {"heads": 3, "kv_heads": 3, "hidden": 24, "layers": 2}),
    "experts": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}
SCORER = scorer("len(solution_str)")


def prepare(folder: Path) -> None:
    """Tiny models, conversations, prompts and a scorer."""
    for name, (family, sizes) in MODELS.items():
        tiny_model_dir(folder / name, family, **sizes)
    write_prompts(folder / "chats.jsonl", talks(4))
    write_prompts(folder / "prompts.parquet", 4)
    (folder / "scorer.py").write_text(SCORER)


def usual(program: str, folder: Path, number: int, words: list[str]) -> list[str]:
    """The command line of a cell: its own words, and the smallest sizes around them."""
    common = ["trainer.total_training_steps=1", "trainer.logger=[]", "trainer.save_freq=-1", "trainer.device=cpu",
              f"trainer.default_local_dir={folder}/run{number}"]  # fmt: skip
    if program == "sft_trainer":
        own = [f"data.train_files={folder}/chats.jsonl", "data.train_batch_size=4", "data.max_length=32"]
    else:
        own = [f"data.train_files={folder}/prompts.parquet", f"data.val_files={folder}/prompts.parquet",
               "data.train_batch_size=2", "data.max_prompt_length=48", "data.max_response_length=4",
               "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.test_freq=-1",
               "trainer.val_before_train=false",
               f"reward.custom_reward_function.path={folder}/scorer.py"]  # fmt: skip
    return [*common, *own, *(word.replace("@", f"{folder}/") for word in words)]


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Relations between settings are not looked at inside: what is built says for itself what it cannot do."""
    with mock.patch("verl.config.loading.configuration._check_whole", lambda *given: None):
        yield


def start(program: str, words: list[str], ranks: Any) -> None:
    """Build what the settings say and train one step."""
    from verl.config import load_config
    from verl.trainer import launch, main_ppo, sft_trainer

    config: Any = load_config(program, words)
    if program == "sft_trainer":
        launch.run_checked(config, sft_trainer.build_sft, ranks)
    else:
        main_ppo.run_ppo(config)


def reason(check: Callable[..., Any], *arguments: Any) -> str | None:
    """Why it fails; None where it does not."""
    try:
        check(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def outcomes(ranks: Any, folder: Path) -> list[Any]:
    """Of every cell in ``cells.json``, a program and its words: why it is refused, why it does not start."""
    from verl.config import load_config
    from verl.engines.megatron.parallel import leave

    if ranks.is_first:
        prepare(folder)
    ranks.barrier()
    os.environ["WORLD_SIZE"] = str(ranks.size)
    answers = []
    for number, (program, words, starts) in enumerate(json.loads((folder / "cells.json").read_text())):
        leave()
        line = usual(program, folder, number, words)
        refused = reason(load_config, program, line)
        with unchecked():
            failed = reason(start, program, line, ranks) if starts else None
        answers.append([refused, failed])
        _end_groups()
    return answers

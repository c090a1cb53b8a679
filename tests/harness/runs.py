"""Runs of `main_ppo` in this process on a tiny model, of which tests see the batches, or what the file logger wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.harness.configs import changed
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from tests.harness.scorers import LETTERS
from verl.config import load_config
from verl.protocol import DataProto
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.callbacks import Callback

COMMON = (
    "algorithm.adv_estimator=grpo",
    "data.train_files=train.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=8",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "reward.custom_reward_function.path=scorer.py",
    "trainer.logger=[file]",
    "trainer.resume_mode=disable",
    "trainer.total_training_steps=1",
    "trainer.runtime=local",
)
CLOCKS = ("timing", "perf/", "rollout_data/")
"""How metrics begin that say how fast something was computed or written, and not what."""


@dataclass
class Seen:
    """What a run left behind: one entry per step."""

    batches: list[DataProto] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    trainer: Any = None
    folder: Path | None = None


class Keep(Callback):
    """Keeps the trained batch and the metrics of each step."""

    def __init__(self, seen: Seen):
        self.seen = seen

    def on_step_end(self, trainer, batch):
        self.seen.batches.append(batch)
        self.seen.metrics.append(trainer.ctx.metrics.values())


def prepare(scorer: str = LETTERS, rows: Any = 8, **model: Any) -> None:
    """The model folder, prompts and reward file of a run, in the working directory."""
    tiny_model_dir("model", **model)
    write_prompts("train.parquet", rows)
    Path("scorer.py").write_text(scorer)


def train(*changes: str, watch: Callback | None = None) -> Seen:
    """Run and return what was seen; ``changes`` are words of the command line, ``watch`` is one more callback."""
    seen = Seen()

    class Runner(TaskRunner):
        def make_trainer(self, config, tokenizer, processor):
            seen.trainer = super().make_trainer(config, tokenizer, processor)
            seen.trainer.callbacks += [Keep(seen), *([watch] if watch else [])]
            return seen.trainer

    run_ppo(load_config("ppo_trainer", changed(COMMON, *changes)), Runner)
    return seen


def logged_steps(name: str, *changes: str) -> list[dict[str, Any]]:
    """What each step of a run logged in ``logs``, where VERL_FILE_LOGGER_ROOT has to point to.

    Args:
        name: of the run; its checkpoints lie in a folder of this name.
    """
    mine = (f"trainer.experiment_name={name}", f"trainer.default_local_dir={name}", "trainer.project_name=logged")
    run_ppo(load_config("ppo_trainer", changed(COMMON, *mine, *changes)))
    return logged("logs", name)


def records(file: str | Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON."""
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


def logged(logs: str | Path, name: str = "*") -> list[dict[str, Any]]:
    """The metrics of each step, from the only file of this name below ``logs``."""
    (file,) = Path(logs).rglob(f"{name}.jsonl")
    return [record["data"] for record in records(file)]


def numbers(step: dict[str, float], besides: tuple[str, ...] = CLOCKS) -> dict[str, float]:
    """The metrics that say what was computed."""
    return {name: value for name, value in step.items() if not name.startswith(besides)}


def saved_tensors(folder: str | Path) -> dict[tuple[str, str], torch.Tensor]:
    """All tensors of a checkpoint, by file and name."""
    files = sorted(Path(folder).rglob("*.safetensors"))
    return {(str(f.relative_to(folder)), name): t for f in files for name, t in load_file(f).items()}


def differing(one: str | Path, other: str | Path) -> list[tuple[str, str]]:
    """The tensors in which two checkpoints differ in any bit; both have the same ones, and some."""
    a, b = saved_tensors(one), saved_tensors(other)
    assert a.keys() == b.keys() and a
    return [key for key in a if not torch.equal(a[key], b[key])]

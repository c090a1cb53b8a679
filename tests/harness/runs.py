"""Whole runs of `main_ppo` in this process on a tiny model, with the batches and metrics of every step kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from verl.config import load_config
from verl.protocol import DataProto
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.callbacks import Callback

SCORER = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 10
"""
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


def prepare(scorer: str = SCORER, rows: Any = 8, **model: Any) -> None:
    """The model folder, prompts and reward file of `train`, in the working directory."""
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

    named = {word.partition("=")[0] for word in changes}
    words = [word for word in COMMON if word.partition("=")[0] not in named]
    run_ppo(load_config("ppo_trainer", [*words, *changes]), Runner)
    return seen

"""The quickstart's task at rest, made by the library's own commands: for learning tests and for benchmarks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.harness.programs import PROJECT, fine_tuned, run

WARM_UP = 320


@dataclass(frozen=True)
class Arithmetic:
    """A model that can add and is rarely right, since it goes on after the answer."""

    folder: Path
    model: Path

    @property
    def arguments(self) -> list[str]:
        """What every RL run on the task has in common."""
        return [
            f"data.train_files={self.folder}/data/train.parquet",
            f"data.val_files={self.folder}/data/test.parquet",
            "data.train_batch_size=64",
            "data.max_prompt_length=32",
            "data.max_response_length=8",
            f"actor_rollout_ref.model.path={self.model}",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=64",
            "actor_rollout_ref.actor.optim.lr=2e-4",
            f"reward.custom_reward_function.path={PROJECT}/examples/quickstart/reward.py",
            "trainer.project_name=e2e",
            "trainer.logger=[file]",
        ]


def warmed_up(folder: Path) -> Arithmetic:
    """Data, a new model, and the quickstart's warm-up on demonstrations that do not stop at the answer.

    Args:
        folder: one that has them already is used as it is.
    """
    task = Arithmetic(folder, folder / "sft" / f"global_step_{WARM_UP}" / "model" / "huggingface")
    if task.model.exists():
        return task
    quickstart = PROJECT / "examples/quickstart"
    counts = ["--train_size", "3072", "--sft_size", "4096"]
    write = PROJECT / "examples/data_preprocess/arithmetic.py"
    run([sys.executable, f"{write}", "--local_save_dir", "data", *counts, "--seed", "0"], cwd=folder)
    run([sys.executable, f"{quickstart}/demonstrations.py", "data/sft.parquet", "data/pupil.parquet"], cwd=folder)
    run([sys.executable, f"{quickstart}/model.py", "base"], cwd=folder)
    schedule = ("optim.lr=3e-3", "optim.lr_warmup_steps=20", "optim.lr_scheduler_type=cosine")
    sizes = ("data.train_batch_size=128", "data.max_length=32")
    fine_tuned(folder, WARM_UP, "data.train_files=data/pupil.parquet", *sizes, *schedule)
    return task

"""Whole programs on several ranks: how each is started on a number of processes, and what it leaves behind.

A program is anything that trains from a folder of inputs into a run folder, saves every ``SAVE_AT`` steps and goes on
from the checkpoint that it finds there. What must hold of every one of them is in `test_resume_elsewhere`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.harness.models import tiny_model_dir
from tests.harness.ranks import run_cells
from tests.harness.rows import turns, write_prompts
from verl.models.hf_folder import read_weights

SAVE_AT, STEPS = 2, 4


@dataclass(frozen=True)
class Program:
    """One program.

    Args:
        prepare: writes its inputs into a folder.
        launch: (inputs, run folder, number of processes): runs it to its end.
        role: the part of the checkpoint that is looked at.
        loss, tokens: names of its metrics: what is minimised, and what tells one batch from another.
    """

    prepare: Callable[[Path], None]
    launch: Callable[[Path, Path, int], None]
    role: str
    loss: str
    tokens: str

    def runs(self, folder: Path, saved: int, resumed: tuple[int, ...]) -> dict[str, Path]:
        """A whole run on ``saved`` ranks, and runs on other numbers that continue copies of its first checkpoint."""
        inputs = folder / "inputs"
        inputs.mkdir(parents=True)
        self.prepare(inputs)
        found = {"straight": folder / "straight"}
        self.launch(inputs, found["straight"], saved)
        for size in resumed:
            root = found[f"resumed on {size}"] = folder / f"resumed-{size}"
            shutil.copytree(found["straight"] / f"global_step_{SAVE_AT}", root / f"global_step_{SAVE_AT}")
            self.launch(inputs, root, size)
        return found

    def metrics(self, root: Path) -> dict[int, dict[str, float]]:
        """Step -> its metrics."""
        lines = (root / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record["data"] for record in map(json.loads, lines)}

    def weights(self, root: Path) -> dict[str, Tensor]:
        saved = read_weights(root / f"global_step_{STEPS}" / self.role / "huggingface")
        return dict(sorted(saved.items()))

    def controller(self, root: Path) -> dict[str, Any]:
        """The controller's state in the last checkpoint."""
        return json.loads((root / f"global_step_{STEPS}" / "trainer.json").read_text())


# ---- supervised fine-tuning --------------------------------------------------------------------------------------

SUMS = [(a, b) for a in range(4) for b in range(3)]


def sft_arguments(inputs: Path, root: Path) -> list[str]:
    """Two epochs of two steps of five rows, which no number of ranks divides; validation on twelve."""
    return [
        f"data.train_files={inputs}/sft.parquet",
        f"data.val_files={inputs}/sft.parquet",
        "data.train_batch_size=5",
        f"model.path={inputs}/model",
        "optim.lr=1e-2",
        "optim.override_optimizer_config={eps: 1e-4}",
        "optim.lr_scheduler_type=cosine",
        "trainer.total_epochs=2",
        f"trainer.save_freq={SAVE_AT}",
        f"trainer.test_freq={SAVE_AT}",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={root}",
    ]


def _prepare_sft(inputs: Path) -> None:
    tiny_model_dir(inputs / "model", "qwen3", tie_word_embeddings=True)
    rows = [{"messages": turns(f"{a}+{b}=", str(a + b) * (1 + a % 3))} for a, b in SUMS]
    write_prompts(inputs / "sft.parquet", rows)


@dataclass(frozen=True)
class SftCell:
    """The program as a cell of a group."""

    inputs: Path
    root: Path
    changes: tuple[str, ...] = ()

    @property
    def __name__(self) -> str:
        return "sft"

    def __call__(self, ranks: Any, folder: Path) -> None:
        from verl import env
        from verl.config import load_config
        from verl.trainer.sft_trainer import run_sft

        env.set_value("VERL_FILE_LOGGER_PATH", str(self.root / "metrics.jsonl"))
        if self.changes:
            env.set_value("WORLD_SIZE", str(ranks.size))  # as torchrun does; sizes are held against it
        words = [*sft_arguments(self.inputs, self.root), *self.changes]
        run_sft(load_config("sft_trainer", words), ranks)


def _launch_sft(inputs: Path, root: Path, size: int) -> None:
    run_cells(size, [SftCell(inputs, root)], root.parent / f"{root.name}-notes")


PROGRAMS = {"sft": Program(_prepare_sft, _launch_sft, "model", "train/loss", "train/global_tokens")}

"""A GRPO run of three steps, looked at while it runs and afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs import Seen, prepare, train
from tests.viewer.served import served
from verl.trainer.ppo.callbacks import Callback

STEPS = 3


class Look(Callback):
    """Looks at the run at the end of its second step, before that step's metrics are logged."""

    def __init__(self) -> None:
        self.runs: dict[str, Any] = {}
        self.curve: dict[str, Any] = {}
        self.page: dict[str, Any] = {}

    def on_step_end(self, trainer, batch):
        if trainer.ctx.step == 2:
            with served(Path("run")) as site:
                (self.runs,) = site.get("runs")["runs"]
                (self.curve,) = site.get("curves", metric="critic/score/mean")["series"]
                self.page = site.indexed("samples", step=1)


@dataclass
class Trained:
    """The run: its folder, its batches, and what was seen in its second step."""

    folder: Path
    seen: Seen
    live: Look = field(default_factory=Look)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Trained:
    """The run; tests only read it."""
    folder, look = tmp_path_factory.mktemp("viewed"), Look()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "run" / "metrics.jsonl"))
        prepare()
        seen = train(
            "trainer.default_local_dir=run", "trainer.rollout_data_dir=run/samples", "trainer.experiment_name=run",
            f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=9",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.calculate_log_probs=true",
            "data.oversample_factor=1.5", "data.gen_batch_size=2",
            watch=look,
        )  # fmt: skip
    return Trained(folder / "run", seen, look)


@pytest.fixture(scope="module")
def site(trained):
    """A server of the run."""
    with served(trained.folder) as here:
        here.indexed("samples")
        yield here

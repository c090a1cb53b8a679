"""``data.sampler``: a curriculum decides which prompts a run trains on, and a resumed run goes on with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.configs import changed
from tests.harness.runs import COMMON, differing, prepare
from verl.trainer import main_ppo

CURRICULUM = """
import json
from verl.experimental.dataset.sampler import AbstractCurriculumSampler


class Downwards(AbstractCurriculumSampler):
    '''Rows from the first one; after the first step, from the last one down.'''

    def __init__(self, data_source, data_config):
        self.rows, self.steps, self.given = len(data_source), 0, 0

    def __len__(self):
        return self.rows

    def __iter__(self):
        while self.given < self.rows:
            self.given += 1
            yield self.given - 1 if self.steps < 1 else self.rows - self.given + 1
        self.given = 0

    def update(self, batch):
        self.steps += 1
        with open("updates.jsonl", "a") as file:
            print(json.dumps([self.steps, sorted(set(map(int, batch.non_tensor_batch["index"])))]), file=file)

    def state_dict(self):
        return {"steps": self.steps, "given": self.given}

    def load_state_dict(self, state):
        self.steps, self.given = state["steps"], state["given"]
"""


def train(steps: int, folder: str, *changes: str) -> int:
    words = (
        "data.sampler.class_path=curriculum.py",
        "data.sampler.class_name=Downwards",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}",
    )
    return main_ppo.main(changed(COMMON, *words, *changes))


@pytest.fixture
def here(workplace):
    prepare(rows=6)
    Path("curriculum.py").write_text(CURRICULUM)
    return workplace


def updates() -> list[list]:
    return [json.loads(line) for line in Path("updates.jsonl").read_text().splitlines()]


def test_a_curriculum_learns_from_each_step_and_survives_a_resume(here):
    assert train(3, "straight") == 0
    straight = updates()
    assert straight == [[1, [0, 1]], [2, [3, 4]], [3, [1, 2]]]  # the third row of the epoch is 6 - 3 + 1 = 4
    Path("updates.jsonl").unlink()
    assert train(2, "stopped") == 0 and train(3, "stopped") == 0
    assert updates() == straight
    assert differing("straight/global_step_3", "stopped/global_step_3") == []


def test_a_curriculum_must_not_be_read_ahead(here, capsys):
    assert train(1, "run", "data.dataloader_num_workers=1") == 2
    assert "data.dataloader_num_workers: a sampler that keeps a state or learns" in capsys.readouterr().err


def test_a_curriculum_without_a_name_is_refused(here, capsys):
    assert train(1, "run", "data.sampler.class_name=null") == 2
    assert "data.sampler.class_name: data.sampler.class_path alone names no class" in capsys.readouterr().err

"""``data.sampler`` and ``data.source_weights`` decide which prompts a run trains on, and a resumed run continues so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.configs import changed
from tests.harness.rows import addition_rows
from tests.harness.runs import COMMON, differing, logged, numbers, prepare
from tests.harness.runs import train as seen_run
from tests.harness.scorers import scorer
from verl.metrics import notices
from verl.trainer import main_ppo

CURRICULUM = """
import json
from verl.experimental.dataset.sampler import AbstractCurriculumSampler


class Downwards(AbstractCurriculumSampler):
    '''Rows from the first one; after the first step, from the last one down.'''

    def __init__(self, data_source, data_config):
        self.rows, self.steps, self.given = len(data_source), 0, 0
        self.metrics = ["a list of the user's, and no method"]

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


PLAIN = """
from torch.utils.data import Dataset
from verl.data import RLHFDataset


class Plain(Dataset):
    def __init__(self, *arguments, **options):
        self.rows = RLHFDataset(*arguments, **options)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        return self.rows[item]
"""


def test_a_sampler_of_the_users_may_mix_a_dataset_of_the_users(here):
    Path("plain.py").write_text(PLAIN)
    plain = ("data.custom_cls.path=plain.py", "data.custom_cls.name=Plain", "data.source_weights={some: 1}")
    assert train(1, "run", *plain) == 0
    assert updates() == [[1, [0, 1]]]
    assert "data.sampler.class_name" in notices()["data.source_weights"]


WEIGHTS = "data.source_weights={few: 0.5, many: 0.5}"
MIXED = ("data.sampler.class_path=pkg://verl.data.curriculum", "data.sampler.class_name=MixedRewardsFirst")


@pytest.fixture
def two_sources(workplace, monkeypatch):
    """Rows 0 and 1 of one source, six of the other; every second row gets one reward for all answers."""
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", "logs")
    rows = [*addition_rows(2, "few"), *addition_rows(6, "many")]
    prepare(scorer("sum(map(ord, solution_str)) % 97 if extra_info['index'] % 2 else 1.0"), rows)
    return workplace


@pytest.mark.parametrize("sampler", [(), MIXED], ids=["shares", "shares and a curriculum"])
def test_a_resumed_mixture_trains_on_the_same_prompts(two_sources, sampler):
    def run(name: str, steps: int) -> None:
        seen_run(
            WEIGHTS,
            *sampler,
            "trainer.save_freq=1",
            "trainer.resume_mode=auto",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={name}",
            f"trainer.experiment_name={name}",
        )

    run("straight", 3)
    run("stopped", 1)
    run("stopped", 3)
    straight, stopped = (list(map(numbers, logged("logs", name))) for name in ("straight", "stopped"))
    assert stopped == straight and len(straight) == 3
    assert [[step[f"data/prompts/{name}"] for name in ("few", "many")] for step in straight] == [[2, 2]] * 3
    assert ("data/curriculum/seen" in straight[0]) == bool(sampler)
    assert differing("straight/global_step_3", "stopped/global_step_3") == []


def test_a_curriculum_learns_of_the_prompts_that_are_dropped(two_sources):
    seen = seen_run(*MIXED, "algorithm.filter_groups.enable=true", "trainer.total_training_steps=2")
    sampler = seen.trainer.source.loader.sampler
    chances = [sampler.chance(row) for row in range(8)]
    trained = {int(row) for batch in seen.batches for row in batch.non_tensor_batch["__row__"]}
    assert trained and all(row % 2 for row in trained), "equal rewards are dropped"
    assert min(chances[::2]) < 1, "and what is dropped comes less often"
    assert all(chances[row] == 1 for row in trained)


def test_a_curriculum_refuses_one_sample_of_each_prompt_before_a_step(two_sources, capsys):
    estimator = "algorithm.adv_estimator=reinforce_plus_plus"
    words = (*MIXED, estimator, "actor_rollout_ref.rollout.n=1", "trainer.rollout_data_dir=dumps")
    assert main_ppo.main(changed(COMMON, *words)) == 2
    assert "actor_rollout_ref.rollout.n: the curriculum compares the samples" in capsys.readouterr().err
    assert not Path("dumps").exists()


def test_weights_that_are_no_shares_end_a_run_at_once(two_sources, capsys):
    assert train(1, "run", "data.source_weights={few: 0.5, many: 1}") == 2
    message = capsys.readouterr().err
    assert (
        "data.source_weights: the weights sum to 1.5, not to 1" in message and "{few: 0.3333, many: 0.6667}" in message
    )


def test_keys_of_a_scorer_neither_mask_nor_hide_a_sample(workplace):
    prepare(scorer("{'score': len(set(solution_str)), 'finish_reason': 'abort', 'unscorable': True}"))
    seen = seen_run("trainer.rollout_data_dir=dumps")
    (batch,) = seen.batches
    assert set(batch.non_tensor_batch["finish_reason"]) <= {"stop", "length"}
    assert not batch.non_tensor_batch["unscorable"].any() and batch.batch["response_mask"].any(-1).all()
    assert set(batch.non_tensor_batch["reward_finish_reason"]) == {"abort"}
    (message,) = (text for key, text in notices().items() if key.endswith("scorer.py, key 'finish_reason'"))
    assert "'reward_finish_reason'" in message

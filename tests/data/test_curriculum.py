"""The curriculum of mixed rewards: chances by arithmetic, frequencies that follow, the same order after a resume."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from tests.harness.rows import addition_rows, columns, write_prompts
from verl.config import DataConfig
from verl.data import RLHFDataset, StatefulLoader
from verl.data.curriculum import FLAT_ROWS, MixedRewardsFirst
from verl.data.loader import PromptSource
from verl.errors import CheckpointError, ConfigError, DataError
from verl.metrics import notices, reset_notices
from verl.protocol import DataProto

CONFIG = DataConfig(seed=7)


def curriculum(rows: int, config: DataConfig = CONFIG) -> MixedRewardsFirst:
    return MixedRewardsFirst(range(rows), config)


def step(rewards: dict[int, list[float]], left_out: tuple[int, ...] = (), flat: tuple[int, ...] = ()) -> DataProto:
    """A trained batch: the rewards of the samples of each row."""
    rows = [row for row, of_row in rewards.items() for _ in of_row]
    scores = torch.tensor([reward for of_row in rewards.values() for reward in of_row])[:, None]
    of_rows = columns(uid=[f"u{row}" for row in rows], __row__=rows)
    of_rows["unscorable"] = np.array([place in left_out for place in range(len(rows))])
    return DataProto.from_dict({"token_level_scores": scores}, of_rows, {FLAT_ROWS: list(flat)})


def epoch_of(sampler: MixedRewardsFirst, number: int) -> list[int]:
    sampler.set_epoch(number)
    return list(sampler)


def test_before_anything_is_learned_an_epoch_is_a_permutation():
    sampler = curriculum(50)
    first, second = epoch_of(sampler, 0), epoch_of(sampler, 1)
    assert sorted(first) == sorted(second) == list(range(50)) and first != second
    assert epoch_of(curriculum(50, DataConfig(seed=8)), 0) != first


def test_a_chance_follows_the_groups_of_its_prompt():
    sampler = curriculum(4)
    sampler.update(step({1: [1.0, 1.0], 2: [0.0, 1.0]}, flat=(3,)))
    # 0.1 + 0.9 m, with m = (1 + 0) / 2 where rewards are equal, and (1 + 1) / 2 where they differ
    assert [sampler.chance(row) for row in range(4)] == pytest.approx([1.0, 0.55, 1.0, 0.55])
    sampler.update(step({1: [0.0, 0.0], 3: [0.5, 0.25]}))
    assert sampler.chance(1) == pytest.approx(0.1 + 0.9 * 0.25)
    assert sampler.chance(3) == pytest.approx(0.1 + 0.9 * 0.75)
    assert sampler.metrics() == {"data/curriculum/seen": 0.75, "data/curriculum/mixed": pytest.approx(2 / 3)}


def test_a_masked_sample_says_nothing_of_its_prompt():
    sampler = curriculum(3)
    batch = step({0: [0.0, 1.0, 1.0], 1: [0.0, 1.0], 2: [1.0, 1.0]}, left_out=(0, 3))
    sampler.update(batch)
    assert sampler.chance(0) == pytest.approx(0.55), "the two samples that count are equal"
    assert sampler.chance(1) == 1.0, "one sample is no comparison"
    assert sampler.chance(2) == pytest.approx(0.55)


def test_prompts_that_teach_nothing_come_a_tenth_as_often():
    sampler = curriculum(100)
    for _ in range(40):
        sampler.update(step({row: [float(row < 50), 1.0] for row in range(100)}))
    drawn = Counter(item < 50 for epoch in range(40) for item in epoch_of(sampler, epoch))
    # Equal are the rewards of rows below 50: of 1.1 that are taken 0.1, and 4000 draws have a deviation below 19.
    assert abs(drawn[True] - 4000 * 0.1 / 1.1) < 60
    assert min(Counter(item for epoch in range(40, 120) for item in epoch_of(sampler, epoch)).values()) > 0


def run(sampler: MixedRewardsFirst, dataset, steps: int, state: dict | None = None) -> tuple[list, dict]:
    """Rows and uids of some steps, each of which teaches the curriculum; and the state after them."""
    source = PromptSource(StatefulLoader(dataset, 4, sampler=sampler))
    if state is not None:
        source.load_state_dict(json.loads(json.dumps(state)))
    drawn = []
    for _ in range(steps):
        prompts = source.next_prompts().non_tensor_batch
        rows = prompts["__row__"].tolist()
        sampler.update(step({row: [0.0, float(row % 3 == 0)] for row in rows}))
        drawn.append([rows, prompts["uid"].tolist()])
    return drawn, source.state_dict()


@pytest.mark.parametrize("steps", range(1, 9))
def test_a_resume_after_any_step_continues_bit_for_bit(tmp_path, tokenizer, steps):
    """18 rows and batches of 4: an epoch ends after the fourth step, with two rows that fill no batch."""
    dataset = RLHFDataset(write_prompts(tmp_path / "rows.jsonl", 18), tokenizer, CONFIG)
    expected, _ = run(MixedRewardsFirst(dataset, CONFIG), dataset, 12)
    begun, state = run(MixedRewardsFirst(dataset, CONFIG), dataset, steps)
    rest, _ = run(MixedRewardsFirst(dataset, CONFIG), dataset, 12 - steps, state)
    assert begun + rest == expected
    assert len({uid for _, uids in expected for uid in uids}) == 48


def test_a_state_that_was_taken_does_not_change_any_more():
    sampler = curriculum(6)
    sampler.update(step({0: [1.0, 1.0]}))
    list(islice(sampler, 2))
    state = sampler.state_dict()
    before = json.dumps(state)
    sampler.update(step({0: [1.0, 1.0], 1: [0.0, 0.0]}))
    list(islice(sampler, 3))
    assert json.dumps(state) == before


def test_sources_have_their_shares_in_a_curriculum_too(tmp_path, tokenizer):
    config = DataConfig(seed=1, source_weights={"easy": 0.25, "hard": 0.75})
    rows = [*addition_rows(12, "easy"), *addition_rows(4, "hard")]
    dataset = RLHFDataset(write_prompts(tmp_path / "rows.jsonl", rows), tokenizer, config)
    reset_notices()
    sampler = MixedRewardsFirst(dataset, config)
    assert "16 prompts has 4 of easy" in notices()["data.source_weights"]
    for _ in range(30):
        sampler.update(step({row: [1.0, 1.0] for row in range(1, 12)}))
    for epoch in range(4):
        drawn = epoch_of(sampler, epoch)
        assert [sum(item < 12 for item in drawn[first : first + 4]) for first in range(0, 16, 4)] == [1] * 4
    easy = Counter(item for epoch in range(4, 44) for item in epoch_of(sampler, epoch) if item < 12)
    # One chance of 1 and eleven of 0.1: a share of 1 / 2.1 of the 160, with a deviation below 6.4.
    assert abs(easy[0] - 160 / 2.1) < 20


def test_one_sample_of_each_prompt_is_refused():
    curriculum(4).check_samples(2)
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.n: .*one of each.*Allowed: 2 or more"):
        curriculum(4).check_samples(1)


def test_a_state_of_another_seed_or_other_sources_is_refused(tmp_path, tokenizer):
    rows = [*addition_rows(4, "easy"), *addition_rows(4, "hard")]
    dataset = RLHFDataset(write_prompts(tmp_path / "rows.jsonl", rows), tokenizer, CONFIG)

    def loader(**settings) -> StatefulLoader:
        return StatefulLoader(dataset, 4, sampler=MixedRewardsFirst(dataset, DataConfig(**settings)))

    state = json.loads(json.dumps(loader(seed=7).state_dict()))
    loader(seed=7).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"had seed=7, this run has seed=8"):
        loader(seed=8).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"had sources=.*'1', 8.*, this run has sources=.*'easy', '1/4', 4"):
        loader(seed=7, source_weights={"easy": 0.25, "hard": 0.75}).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"had no shuffle, this run has shuffle=True"):
        StatefulLoader(dataset, 4, seed=7).load_state_dict(state)


def test_a_dataset_that_does_not_number_its_rows_is_refused():
    batch = step({0: [1.0, 0.0]})
    del batch.non_tensor_batch["__row__"]
    with pytest.raises(DataError, match=r"data\.custom_cls: .*does not number them"):
        curriculum(4).update(batch)

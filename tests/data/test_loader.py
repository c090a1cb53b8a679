"""Batch order as a function of (seed, epoch), exact resumption anywhere, and refusals."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import Dataset, Sampler

from verl.data.loader import EpochSampler, PromptSource, StatefulLoader
from verl.errors import CheckpointError, ConfigError, DataError
from verl.metrics import notices, reset_notices


class Numbers(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, item):
        return {"n": torch.tensor(item), "name": f"row {item}"}


def loader(count=10, batch_size=3, **options):
    return StatefulLoader(Numbers(count), batch_size, **{"seed": 1, **options})


def numbers(batches):
    return [batch["n"].tolist() for batch in batches]


def through_json(state):
    return json.loads(json.dumps(state))


def test_an_epoch_gives_every_row_once_and_leaves_out_the_small_rest():
    found = numbers(loader())
    assert [len(batch) for batch in found] == [3, 3, 3] and len(loader()) == 3
    assert len({n for batch in found for n in batch}) == 9
    whole = numbers(loader(drop_last=False))
    assert [len(batch) for batch in whole] == [3, 3, 3, 1] and len(loader(drop_last=False)) == 4
    assert sorted(n for batch in whole for n in batch) == list(range(10))


def test_rows_that_fill_no_batch_are_left_out_with_a_notice():
    reset_notices()
    loader(count=9)
    assert not notices()
    loader(count=11, key="data.train_batch_size")
    assert notices() == {"data.train_batch_size": "an epoch leaves out 2 of 11 rows, which fill no batch of 3"}
    reset_notices()
    loader(count=11, key="data.train_batch_size", sampler=range(7))
    assert "leaves out 1 of 7 rows" in notices()["data.train_batch_size"], "of those that the sampler draws"


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    torch.manual_seed(0)
    one = loader()
    first, second = numbers(one), numbers(one)
    torch.manual_seed(99)
    torch.rand(7)
    other = loader()
    assert (numbers(other), numbers(other)) == (first, second)
    assert first != second and numbers(loader(seed=2)) != first


def test_without_shuffling_rows_come_in_order_in_every_epoch():
    one = loader(shuffle=False)
    assert numbers(one) == numbers(one) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_the_loader_leaves_the_global_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    numbers(loader())
    assert torch.rand(1) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_in_mid_epoch_continues_with_the_next_row(workers):
    straight = loader(num_workers=workers)
    expected = numbers(straight) + numbers(straight)
    run = loader(num_workers=workers)
    first = iter(run)
    given = numbers([next(first), next(first)])  # workers have fetched further by now
    resumed = loader(num_workers=2 - workers)
    resumed.load_state_dict(through_json(run.state_dict()))
    assert resumed.epoch == 0
    assert given + numbers(resumed) + numbers(resumed) == expected


def test_a_checkpoint_at_the_last_batch_resumes_with_a_whole_next_epoch():
    run = loader()
    for _ in run:
        state = through_json(run.state_dict())
    assert state["epoch"] == 1 and state["rows_given"] == 0
    resumed = loader()
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    found = numbers(resumed)
    assert len(found) == 3 and found == numbers(run)


def test_a_loop_over_epochs_counts_them():
    run, seen = loader(), []
    while run.epoch < 3:
        seen += [run.epoch]
        for _ in run:
            pass
    assert seen == [0, 1, 2]


def test_an_epoch_left_early_begins_anew():
    run = loader()
    first = numbers([next(iter(run))])
    assert numbers(run)[:1] == first and run.epoch == 1


def test_a_state_taken_before_the_first_batch_is_the_beginning():
    resumed = loader()
    resumed.load_state_dict(loader().state_dict())
    assert numbers(resumed) == numbers(loader())


def test_resuming_with_another_batch_size_skips_no_row():
    run = loader(count=12, batch_size=3)
    given = numbers([next(iter(run))])[0]
    resumed = loader(count=12, batch_size=2, drop_last=False)
    resumed.load_state_dict(run.state_dict())
    rest = [n for batch in numbers(resumed) for n in batch]
    assert sorted(given + rest) == list(range(12))


@pytest.mark.parametrize("other", [{"count": 11}, {"seed": 2}, {"shuffle": False}])
def test_a_state_of_other_data_or_another_order_is_refused(other):
    message = r"the checkpoint's data had (num_rows|seed|shuffle)=.*resume_mode=disable"
    with pytest.raises(CheckpointError, match=message):
        loader(**other).load_state_dict(loader().state_dict())


def test_fewer_rows_than_a_batch_name_both_sizes():
    with pytest.raises(DataError, match=r"data\.train_batch_size: .*10 rows, fewer than one batch of 16.*=10 or less"):
        loader(batch_size=16)
    assert numbers(loader(batch_size=16, drop_last=False, shuffle=False)) == [list(range(10))]


def test_an_empty_dataset_and_a_batch_of_nothing_are_refused():
    with pytest.raises(DataError, match="has no rows"):
        loader(count=0)
    with pytest.raises(ConfigError, match="at least one row"):
        loader(batch_size=0)


def test_a_collate_function_of_ones_own_is_used():
    batch = next(iter(loader(collate_fn=lambda rows: [row["name"] for row in rows], shuffle=False)))
    assert batch == ["row 0", "row 1", "row 2"]


class EveryOther(Sampler):
    """No state of its own: the loader skips what was given."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(range(0, 10, 2))


def test_a_sampler_without_state_is_fast_forwarded():
    run = loader(sampler=EveryOther(), batch_size=2, drop_last=False)
    next(iter(run))
    resumed = loader(sampler=EveryOther(), batch_size=2, drop_last=False)
    resumed.load_state_dict(through_json(run.state_dict()))
    assert numbers(resumed) == [[4, 6], [8]]


class Curriculum(Sampler):
    """Keeps its own place and mood: rows from the hard end once `harder` was called."""

    def __init__(self):
        self.given, self.step = 0, 1

    def __len__(self):
        return 10

    def __iter__(self):
        while self.given < 10:
            self.given += 1
            yield (self.given - 1) * self.step % 10
        self.given = 0

    def state_dict(self):
        return {"given": self.given, "step": self.step}

    def load_state_dict(self, state):
        self.given, self.step = state["given"], state["step"]


def test_a_sampler_with_state_is_trusted_to_keep_its_place():
    sampler = Curriculum()
    run = iter(loader(sampler=sampler, batch_size=2))
    assert numbers([next(run)]) == [[0, 1]]
    sampler.step = 3
    own = loader(sampler=sampler, batch_size=2)
    expected = numbers([next(run)])
    resumed = loader(sampler=Curriculum(), batch_size=2)
    resumed.load_state_dict(through_json({**own.state_dict(), "sampler": {"given": 2, "step": 3}, "rows_given": 2}))
    assert numbers([next(iter(resumed))]) == expected == [[6, 9]]


@pytest.mark.parametrize("saves", [True, False])
def test_a_state_with_and_one_without_that_of_a_sampler_are_different(saves):
    samplers = (Curriculum(), EveryOther()) if saves else (EveryOther(), Curriculum())
    before, now = (loader(sampler=sampler, batch_size=2) for sampler in samplers)
    words = ("a", "no") if saves else ("no", "a")
    message = rf"data\.sampler: the checkpoint has {words[0]} state of a sampler.*this run keeps {words[1]} state"
    with pytest.raises(CheckpointError, match=message):
        now.load_state_dict(through_json(before.state_dict()))


def test_an_order_and_a_sampler_of_the_users_do_not_resume_each_other():
    for before, now, text in (
        (loader(), loader(sampler=EveryOther()), r"had seed=1, this run has no seed"),
        (loader(sampler=EveryOther()), loader(), r"had no seed, this run has seed=1"),
    ):
        with pytest.raises(CheckpointError, match=text):
            now.load_state_dict(through_json(before.state_dict()))


class NumberedRows(Numbers):
    def __getitem__(self, item):
        return {"__row__": item}


def test_a_sampler_with_state_resumes_where_an_epoch_ends():
    def source():
        return PromptSource(StatefulLoader(NumberedRows(10), 5, sampler=Curriculum()))

    def rows_of(prompts):
        return prompts.non_tensor_batch["__row__"].tolist()

    straight = source()
    assert [rows_of(straight.next_prompts()) for _ in range(2)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    state, later = through_json(straight.state_dict()), straight.next_prompts()
    assert state["sampler"] == {"given": 10, "step": 1}, "of its epoch nothing is left"
    resumed = source()
    resumed.load_state_dict(state)
    again = resumed.next_prompts()
    assert rows_of(again) == rows_of(later) == [0, 1, 2, 3, 4]
    assert again.non_tensor_batch["uid"].tolist() == later.non_tensor_batch["uid"].tolist()


def test_a_sampler_that_draws_nothing_is_named():
    class Nothing(Curriculum):
        def __iter__(self):
            return iter(())

    with pytest.raises(DataError, match=r"data\.sampler\.class_name: Nothing draws no rows for epoch 0"):
        PromptSource(loader(sampler=Nothing())).next_prompts()


def test_a_sampler_with_state_must_not_be_read_ahead():
    with pytest.raises(ConfigError, match=r"data\.dataloader_num_workers: .*must not be read ahead.*Allowed: 0"):
        loader(sampler=Curriculum(), num_workers=1)


def test_the_epoch_sampler_is_a_permutation():
    sampler = EpochSampler(100, shuffle=True, seed=None)
    assert sorted(sampler) == list(range(100)) and list(sampler) == list(sampler) and len(sampler) == 100

"""Each row has the text of the tokens that are there, wherever they stand, and the place of its last sampled one."""

from __future__ import annotations

import torch

from tests.rewards.files import Letters, batch
from verl.rewards import RewardFunction, default_compute_score
from verl.rewards.managers.rows import read_rows


def test_rows_of_any_length_are_decoded_each_by_itself():
    data = batch(["abc", "", "de", "fghij"], truths=["1", "2", "3", "4"])
    data.batch["attention_mask"][3, -5] = 0  # g: the prompt has 6 places, the response 6
    rows = read_rows(data, Letters(), "data_source", RewardFunction.of(default_compute_score))
    assert [row.sample.solution_str for row in rows] == ["abc", "", "de", "fhij"]
    assert [row.length for row in rows] == [4, 0, 3, 5]  # with the end token
    assert [row.last for row in rows] == [3, None, 2, 5]
    assert [row.sample.ground_truth for row in rows] == ["1", "2", "3", "4"]
    assert [row.sample.row for row in rows] == [0, 1, 2, 3]


def test_every_token_counts_where_the_batch_has_no_mask():
    data = batch(["ab", "c"])
    for name in ("attention_mask", "response_mask"):
        del data.batch[name]
    (first, second) = read_rows(data, Letters(), "data_source", None)
    assert (first.sample.solution_str, second.sample.solution_str) == ("ab", "c")
    assert (first.length, second.length) == (3, 3) and second.last == 2
    assert torch.equal(data.batch["responses"][1], torch.tensor([ord("c"), 1, 0]))

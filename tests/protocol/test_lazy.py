"""Columns that lie elsewhere: the numbers of ordinary ones, and what is fetched for them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl.errors import BatchError, WorkerError
from verl.protocol import DataProto, stored, traffic
from verl.protocol.lazy import LazyColumn, last_places, one_entry, row_bounds, scattered_rows, store_tensors, zero_rows

B, P, T = 7, 3, 5


def put(rows: Any) -> Future[Any]:
    """A store: what is behind the reference is there at once."""
    reference: Future[Any] = Future()
    reference.set_result(rows)
    return reference


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three rows of a mask in a block, so that a column has several."""
    monkeypatch.setattr(stored, "BLOCK_BYTES", 3 * T * 8)
    traffic.take()
    yield
    traffic.take()


def columns() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 3, 0, 1, 4, 5, 2])
    mask = (torch.arange(T) < lengths[:, None]).long()
    return {
        "responses": torch.randint(0, 50, (B, T), generator=generator),
        "response_mask": mask,
        "attention_mask": torch.cat([torch.ones(B, P, dtype=torch.long), mask], 1),
        "rollout_log_probs": torch.randn(B, T, generator=generator),
        "token_versions": torch.where(mask.bool(), torch.randint(0, 9, (B, T), generator=generator), -1).int(),
    }


@pytest.fixture
def here() -> dict[str, torch.Tensor]:
    return columns()


@pytest.fixture
def away(here: dict[str, torch.Tensor]) -> dict[str, Any]:
    return store_tensors(here, put, "node-a")


def batch(tensors: dict[str, Any]) -> DataProto:
    return DataProto(TensorDict(dict(tensors), batch_size=[B]), {"uid": np.array(list("abcdefg"), dtype=object)})


CHOICES: dict[str, Any] = {
    "rows": lambda x: x[[5, 0, 0, 3]],
    "a slice": lambda x: x[2:6],
    "a mask of rows": lambda x: x[torch.tensor([True, False, True, False, False, False, True])],
    "a window": lambda x: x[:, 1:4],
    "rows, then a window, then rows": lambda x: x[[6, 1, 2]][:, 2:][[2, 0]],
    "joined": lambda x: torch.cat([x[4:], x[:2]]),
    "narrowed": lambda x: x.narrow(1, 0, 2),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", list(columns()))
def test_rows_and_windows_are_chosen_without_being_fetched(here, away, name: str, choice: str):
    chosen = CHOICES[choice](away[name])
    assert isinstance(chosen, LazyColumn) and traffic.take() == {}
    assert torch.equal(chosen.value(), CHOICES[choice](here[name]))


def test_only_the_blocks_of_the_chosen_rows_are_fetched_and_counted(here, away):
    assert len(away["response_mask"].plan.blocks) == 3
    assert torch.equal(away["response_mask"][[6]] + 0, here["response_mask"][[6]])
    assert traffic.take() == {"fetched/response_mask": T * 8, "total": T * 8}, "the last block has one row"


OPERATIONS: dict[str, Any] = {
    "sums of rows": lambda c: c["response_mask"].sum(-1),
    "sums of the responses' part": lambda c: c["attention_mask"][:, -T:].sum(-1),
    "lengths after a selection": lambda c: c["attention_mask"][[3, 1]].bool().sum(-1),
    "last places": lambda c: last_places(c["response_mask"]),
    "bounds": lambda c: torch.stack(row_bounds(c["token_versions"])),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_a_plan_knows_is_the_number_and_fetches_nothing(here, away, name: str):
    known = OPERATIONS[name](away)
    assert not isinstance(known, LazyColumn) and traffic.take() == {}
    assert torch.equal(known, OPERATIONS[name](here))


def test_a_number_per_row_spreads_over_a_mask_that_is_elsewhere(here, away):
    numbers = torch.tensor([0.5, -1.25, 2.0, 3.0, 0.0, -0.5, 1e-3])[:, None]

    def spread(mask):
        return torch.where(mask.bool(), numbers, 0.0)

    made = spread(away["response_mask"])
    assert isinstance(made, LazyColumn) and torch.equal(made[[4, 1]].value(), spread(here["response_mask"])[[4, 1]])
    rows = np.array([8, 0, 1, 2, 3, 5, 6])
    assert torch.equal(scattered_rows(made, rows, 9).value(), scattered_rows(spread(here["response_mask"]), rows, 9))


def test_rows_of_zeros_are_a_new_column(here, away):
    out = np.array([False, True, False, False, False, True, False])
    emptied = zero_rows(away["response_mask"], out)
    assert torch.equal(emptied.sum(-1), torch.tensor([5, 0, 0, 1, 4, 0, 2])) and traffic.take() == {}
    assert torch.equal(emptied.value(), zero_rows(here["response_mask"], out))
    assert torch.equal(away["response_mask"].value(), here["response_mask"])


def test_scores_of_sequences_are_one_entry_per_row(here, away):
    numbers, places = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]), torch.tensor([4, 2, -1, 0, 3, 4, 1])
    by_hand = torch.zeros(B, T)
    for row, place in enumerate(places.tolist()):
        if place >= 0:
            by_hand[row, place] = numbers[row]
    assert torch.equal(one_entry(numbers, places, here["responses"]), by_hand)
    lazy = one_entry(numbers, places, away["responses"])
    assert torch.equal(lazy.sum(-1), by_hand.sum(-1)) and torch.equal(lazy.value(), by_hand)
    assert traffic.take() == {}


def test_any_other_operation_fetches_and_gives_the_bits_of_an_ordinary_tensor(here, away):
    for name, column in here.items():
        assert torch.equal(away[name].float().exp().mean(0), column.float().exp().mean(0)), name
    read = traffic.take()
    assert read["fetched/rollout_log_probs"] == B * T * 4 and read["total"] > read["fetched/rollout_log_probs"]


@pytest.mark.parametrize(
    "write",
    [lambda x: x.add_(1), lambda x: x.__setitem__(0, 1), lambda x: torch.add(x, 1, out=x)],
    ids=["in place", "an entry", "as output"],
)
def test_a_column_that_lies_elsewhere_is_not_written_to(away, write):
    with pytest.raises(BatchError, match=r"lie elsewhere.*clone"):
        write(away["response_mask"])


def test_a_batch_is_saved_with_its_entries(here, away, tmp_path):
    batch(away).save_to_disk(str(tmp_path / "batch"))
    loaded = DataProto.load_from_disk(str(tmp_path / "batch"))
    assert all(torch.equal(loaded.batch[name], column) for name, column in here.items())


def test_batches_of_different_widths_are_joined_without_being_fetched(here, away):
    short = {name: column[:, : column.shape[1] - 2] for name, column in here.items()}
    lazy = DataProto.concat([batch(away), batch(store_tensors(short, put, "node-b"))])
    plain = DataProto.concat([batch(here), batch(short)])
    assert traffic.take() == {}
    assert all(torch.equal(lazy.fetched().batch[name], plain.batch[name]) for name in here)


def test_a_lost_block_is_named_by_column_and_node():
    def lost(rows: Any) -> Future[Any]:
        reference: Future[Any] = Future()
        reference.set_exception(WorkerError("the owner has died"))
        return reference

    column = store_tensors({"responses": torch.zeros(2, 4)}, lost, "node-b")["responses"]
    with pytest.raises(WorkerError, match=r"column 'responses' are lost.*node node-b.*the owner has died"):
        column.value()

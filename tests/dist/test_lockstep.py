"""Sampling on the ranks of a tensor group: tokens of one process with the whole model, log-probs within 2e-5."""

import pytest

from tests.dist import lockstep_cells as cells
from tests.dist.group import run_cells

pytestmark = pytest.mark.dist

EQUAL = [
    cells.plain_family,
    cells.head_norms,
    cells.softcaps_and_windows,
    cells.tied_vocabulary_in_odd_parts,
    cells.few_seats_and_prompts_in_pieces,
    cells.unshared_prompts,
    cells.experts,
    cells.filtered_and_greedy,
    cells.fewer_key_value_heads_than_ranks,
]
OTHERS = [
    cells.new_weights_whole_or_in_parts,
    cells.requests_that_are_aborted_or_cancelled,
    cells.broken_weights_end_the_requests_on_all_ranks,
    cells.refusals,
    cells.ranks_in_another_order,
]
LIMIT = 2e-5


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return run_cells(2, EQUAL + OTHERS, tmp_path_factory.mktemp("lockstep"))


each = pytest.mark.parametrize("cell", [cell.__name__ for cell in EQUAL])


@each
def test_tokens_and_log_probs_are_those_of_one_process(answers, cell):
    same, gap = answers[cell][0]["equal"]
    assert same and gap < LIMIT


@each
def test_all_ranks_take_the_steps_that_one_process_takes(answers, cell):
    ranks = answers[cell]
    assert all(found["stats"] == ranks[0]["alone"] for found in ranks)


def test_each_rank_holds_its_part_of_weights_and_cache(answers):
    for found in answers["plain_family"]:
        assert found["held"] < 0.52 and found["heads"] == [1, 2] and found["native"]
    for found in answers["fewer_key_value_heads_than_ranks"]:
        assert found["held"] < 0.55 and found["heads"] == [1, 1], "both hold the same head"
    assert all(found["held"] < 0.52 and found["pool"] for found in answers["experts"])


def test_new_weights_arrive_whole_or_as_each_ranks_part(answers):
    for before, whole, parts in answers["new_weights_whole_or_in_parts"][0].values():
        assert not before[0], "the old model samples otherwise"
        for same, gap in (whole, parts):
            assert same and gap < LIMIT


def test_who_stays_gets_the_same_when_others_leave(answers):
    first, second = answers["requests_that_are_aborted_or_cancelled"]
    for same, gap in (first["stayed"], first["again"]):
        assert same and gap < LIMIT
    assert first["steps"] == second["steps"]


def test_logits_that_are_not_finite_end_the_requests_and_not_the_group(answers):
    first = answers["broken_weights_end_the_requests_on_all_ranks"][0]
    assert "not finite" in first["told"] and first["fine"] == 3


def test_parts_may_lie_in_another_order_than_processes(answers):
    _, (same, gap) = answers["ranks_in_another_order"]
    assert same and gap < LIMIT


@pytest.mark.parametrize(
    "name, words",
    [
        ("determinism", ("rollout.full_determinism", "tensor_model_parallel_size")),
        ("heads", ("3 attention heads", "tensor_model_parallel_size", "1, 3")),
        ("width", ("45 wide", "tensor_model_parallel_size")),
    ],
)
def test_what_the_ranks_cannot_share_is_refused(answers, name, words):
    for told in answers["refusals"]:
        for word in words:
            assert word in told[name], told[name]


def test_only_the_first_rank_takes_requests(answers):
    assert "only the first rank" in answers["refusals"][1]["follower"]

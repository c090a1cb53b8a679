"""Executed plans: bitwise the gathered and sliced tensors, the planned bytes, and no more memory than a layer."""

import pytest

from tests.dist import resharding_cells as cells
from tests.harness.ranks import run_cells

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[4, 8])
def answers(request, tmp_path_factory):
    chosen = [cells.every_rank_gets_its_sampling_shards, cells.a_shard_of_another_shape_is_refused]
    return run_cells(request.param, chosen, tmp_path_factory.mktemp(f"resharding{request.param}"))


def test_sampling_shards_are_bitwise_the_slices_of_the_whole_weights(answers):
    for rank in answers["every_rank_gets_its_sampling_shards"]:
        for found in rank:
            assert found["exact"] and found["complete"], found


def test_bytes_on_the_wire_are_the_planned_ones_on_every_rank(answers):
    ranks = answers["every_rank_gets_its_sampling_shards"]
    for rank in ranks:
        for found in rank:
            assert found["sent"] == found["planned"], found
    assert sum(found["sent"] for rank in ranks for found in rank) > 100_000


def test_a_rank_holds_at_most_a_layer_and_a_bucket_on_top(answers):
    for rank in answers["every_rank_gets_its_sampling_shards"]:
        for found in rank:
            assert found["peak"] <= found["bound"], found
    assert any(found["peak"] for rank in answers["every_rank_gets_its_sampling_shards"] for found in rank)


def test_a_shard_that_the_plan_does_not_know_is_an_error_with_both_shapes(answers):
    for message in answers["a_shard_of_another_shape_is_refused"]:
        assert "model.embed_tokens.weight" in message and "(3, 3)" in message

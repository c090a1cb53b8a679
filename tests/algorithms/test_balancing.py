import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.balancing import (
    balance_within_mini_batches,
    calculate_workload,
    get_group_balanced_partitions,
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
    log_seqlen_unbalance,
    lower_bound,
    partition,
)
from verl.errors import ConfigError

LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=40)


def sums(costs, parts):
    return [sum(costs[i] for i in part) for part in parts]


def test_the_partition_in_use_finds_the_optimum_of_the_worked_examples():
    assert sorted(sums([8, 7, 6, 5, 4], partition([8, 7, 6, 5, 4], 2, equal_size=False))) == [15, 15]
    assert sums([8, 7, 6, 5, 4, 2], partition([8, 7, 6, 5, 4, 2], 2, equal_size=True)) == [16, 16]


def test_upstreams_names_of_methods_give_the_partition_in_use():
    assert karmarkar_karp is greedy_partition is get_seqlen_balanced_partitions
    assert karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False) == partition([8, 7, 6, 5, 4], 2, equal_size=False)


def test_workloads_of_known_lengths():
    assert calculate_workload([512, 1024, 4096, 32768]).tolist() == [12845056, 26214400, 117440512, 1879048192]


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_all_rows_are_split_into_non_empty_parts(lengths, k):
    method = get_seqlen_balanced_partitions
    k = min(k, len(lengths))
    parts = method(lengths, k, False)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert len(parts) == k and all(part == sorted(part) and part for part in parts)
    usable = lengths[: len(lengths) // k * k]
    equal = method(usable, k, True)
    assert sorted(i for part in equal for i in part) == list(range(len(usable)))
    assert {len(part) for part in equal} == {len(usable) // k}
    assert method(lengths, k, False) == parts


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 8))
def test_the_spread_is_at_most_the_largest_item_and_no_worse_than_greedy(lengths, k):
    k = min(k, len(lengths))
    found = sums(lengths, partition(lengths, k, equal_size=False))
    assert max(found) - min(found) <= max(lengths)
    greedy = [0] * k
    for length in sorted(lengths, reverse=True):
        greedy[greedy.index(min(greedy))] += length
    assert max(found) <= max(greedy)
    assert max(found) >= lower_bound(lengths, k, equal_size=False) - 1e-6


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=6, max_size=6))
def test_three_pairs_are_within_a_tenth_of_the_exhaustive_optimum(costs):
    def heaviest(order):
        return max(sum(costs[i] for i in order[j : j + 2]) for j in (0, 2, 4))

    best = min(heaviest(order) for order in itertools.permutations(range(6)))
    assert max(sums(costs, partition(costs, 3, equal_size=True))) <= best * 1.1


@pytest.mark.parametrize("sigma", [0.3, 1.2])
def test_equal_shares_of_8192_rows_on_128_ranks_are_within_a_thousandth_of_the_bound(sigma):
    lengths = np.exp(np.random.default_rng(0).normal(6, sigma, 8192)).clip(1, 16384).astype(np.int64)
    for use_workload, costs in ((True, calculate_workload(lengths)), (False, lengths)):
        order = balance_within_mini_batches(lengths, 8192, 128, use_workload=use_workload)
        heaviest = costs[np.array(order)].reshape(128, 64).sum(axis=1).max()
        assert heaviest <= lower_bound(costs, 128) * 1.001


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([4, 8]))
def test_balancing_never_moves_a_row_to_another_mini_batch(seed, batches, ranks, rows):
    lengths = np.random.default_rng(seed).integers(1, 1000, batches * rows)
    order = balance_within_mini_batches(lengths, rows, ranks)
    assert sorted(order) == list(range(batches * rows))
    shares = np.array(order).reshape(ranks, batches, rows // ranks)
    for batch in range(batches):
        assert set((shares[:, batch] // rows).ravel()) == {batch}


def test_a_mini_batch_that_does_not_divide_is_refused_by_key():
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size.*multiple of 4 rows"):
        balance_within_mini_batches([1] * 12, 6, 4)


@pytest.mark.parametrize(("count", "k", "equal"), [(3, 4, False), (5, 2, True), (3, 0, False)])
def test_impossible_splits_are_refused(count, k, equal):
    with pytest.raises(ConfigError, match="cannot be split"):
        partition([1] * count, k, equal)


def test_rows_of_one_prompt_stay_together():
    uids = list("aabbccdd")
    parts = get_group_balanced_partitions([100, 100, 1, 1, 50, 50, 2, 2], uids, 2)
    assert sorted(i for part in parts for i in part) == list(range(8))
    assert [len(part) for part in parts] == [4, 4]
    owners = [{uids[i] for i in part} for part in parts]
    assert owners[0].isdisjoint(owners[1]) and {"a", "c"} not in owners
    ragged = get_group_balanced_partitions([9, 9, 9, 1, 1], list("aaabc"), 2)
    assert sorted(ragged) == [[0, 1, 2], [3, 4]]


def test_token_counts_before_and_after():
    found = log_seqlen_unbalance([10, 1, 2, 3], [[0], [1, 2, 3]], "global_seqlen")
    assert found == {
        "global_seqlen/min": 5,
        "global_seqlen/max": 11,
        "global_seqlen/minmax_diff": 6,
        "global_seqlen/balanced_min": 6,
        "global_seqlen/balanced_max": 10,
        "global_seqlen/mean": 8,
    }


def test_rows_of_one_group_go_to_one_rank_and_every_rank_gets_as_many():
    groups = [number // 4 for number in range(32)]
    lengths = np.random.default_rng(0).integers(10, 500, 32)
    order = balance_within_mini_batches(lengths, 16, 2, group_ids=groups)
    assert sorted(order) == list(range(32))
    for rank in (order[:16], order[16:]):
        for mini_batch in (rank[:8], rank[8:]):
            assert sorted(groups[row] for row in mini_batch) == sorted([groups[row] for row in mini_batch[::4]] * 4)
    loads = [sum(calculate_workload(lengths[rank])) for rank in (order[:16], order[16:])]
    assert max(loads) / min(loads) < 1.2


def test_groups_that_cannot_be_split_evenly_are_cut():
    """Three groups of two rows on two ranks: equal counts come first."""
    order = balance_within_mini_batches([5, 5, 5, 5, 5, 5], 6, 2, group_ids=[0, 0, 1, 1, 2, 2])
    assert sorted(order) == list(range(6))

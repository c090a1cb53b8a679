"""What holds for every estimator: it equals its float64 oracle, and no order, padding or junk shows in it."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.advantages.oracles import ORACLES
from tests.harness.algorithms import poison, ragged_mask
from verl.algorithms.advantages import call_estimator
from verl.errors import ConfigError
from verl.registry import ADVANTAGE_ESTIMATORS

NAMES = sorted(ADVANTAGE_ESTIMATORS.builtin_targets())
HOLES = [n for n in NAMES if n != "optimal_token_baseline"]  # it counts positions; its tir form counts tokens
CONFIG = SimpleNamespace(
    gamma=0.97, gdpo_reward_keys=["first", "second"], gdpo_reward_weights=None, vapo_length_alpha=0.05,
    vapo_lam_critic=1.0, gigpo=SimpleNamespace(step_advantage_w=0.7),
)  # fmt: skip
TENSORS = ("token_level_rewards", "values", "old_log_probs", "sum_pi_squared")


def batch_of(seed, rows, width, num_groups=3, holes=True, dtype=torch.float64):
    """Ragged rows of ragged shuffled groups, some empty, with repeated rewards; NaN outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask(generator, rows, width, holes)
    mask[0, 0] = 1
    noise = lambda: torch.rand(rows, width, generator=generator, dtype=torch.float64)
    numbers = lambda high: torch.randint(0, high, (rows,), generator=generator)
    rewards = torch.where(noise() > 0.6, torch.round(2 * noise()) / 2, 0.0) * mask
    p = 0.95 * noise() + 0.01
    tensors = {
        "token_level_rewards": rewards,
        "values": noise(),
        "old_log_probs": p.log(),
        "sum_pi_squared": p**2 + (1 - p) ** 2 * noise(),
    }
    return {
        **{name: poison(x.to(dtype), mask) for name, x in tensors.items()},
        "response_mask": mask,
        "reward_baselines": numbers(3).to(dtype) / 2,
        "index": np.array([f"u{i}" for i in numbers(num_groups).tolist()], dtype=object),
        "non_tensor_batch": {
            "first": np.array(numbers(2).tolist(), dtype=object),
            "second": np.array(numbers(3).tolist(), dtype=object),
            "turn_states": states_of(generator, rows, width),
        },
    }


def states_of(generator, rows, width):
    """Where each row's actions begin, the first at 0, and one of two states each."""
    states = np.empty(rows, dtype=object)
    for row in range(rows):
        begins = [0, *(place for place in range(1, width) if torch.rand((), generator=generator) < 0.4)]
        states[row] = [(place, "ab"[int(torch.randint(0, 2, (), generator=generator))]) for place in begins]
    return states


def call(name, batch, **more):
    return call_estimator(
        ADVANTAGE_ESTIMATORS.get(name), gamma=0.97, lam=0.9, singleton="zero", config=CONFIG, **{**batch, **more}
    )


def as_lists(batch):
    mask = batch["response_mask"].bool()
    rows = {name: [x[m].tolist() for x, m in zip(batch[name], mask)] for name in TENSORS}
    return {
        **rows,
        "rewards": rows["token_level_rewards"],
        "uids": list(batch["index"]),
        "reward_baselines": batch["reward_baselines"].tolist(),
        "gamma": 0.97,
        "lam": 0.9,
        **{name: list(x) for name, x in batch["non_tensor_batch"].items()},
        "turn_states": [
            [(int(m[:place].sum()), state) for place, state in row]
            for row, m in zip(batch["non_tensor_batch"]["turn_states"], mask)
        ],
    }


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 7), st.integers(1, 4))
def test_it_equals_the_float64_oracle(name, seed, rows, width, num_groups):
    batch = batch_of(seed, rows, width, num_groups, holes=name in HOLES)
    advantages, _ = call(name, batch)
    mask = batch["response_mask"].bool()
    expected = torch.tensor([x for row in ORACLES[name](as_lists(batch)) for x in row], dtype=torch.float64)
    torch.testing.assert_close(advantages[mask], expected, atol=1e-7, rtol=1e-6)
    assert (advantages[~mask] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_float32_stays_within_1e_5_of_float64(name):
    wide, narrow = batch_of(3, 24, 16), batch_of(3, 24, 16, dtype=torch.float32)
    for ours, theirs in zip(call(name, narrow), call(name, wide)):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(0, 4))
def test_neither_row_order_nor_padding_shows(name, seed, rows, padding):
    batch = batch_of(seed, rows, 5, holes=name in HOLES)
    expected = call(name, batch)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    pad = lambda x, value: torch.nn.functional.pad(x[order], (0, padding), value=value)
    moved = {
        **{k: pad(batch[k], torch.nan) for k in TENSORS},
        "response_mask": pad(batch["response_mask"], 0),
        "reward_baselines": batch["reward_baselines"][order],
        "index": batch["index"][order.numpy()],
        "non_tensor_batch": {k: x[order.numpy()] for k, x in batch["non_tensor_batch"].items()},
    }
    for ours, theirs in zip(call(name, moved), expected):
        torch.testing.assert_close(ours[:, :5], theirs[order], atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_degenerate_batches_are_finite(name):
    """Groups of one, equal rewards, empty rows, full rows, a single token, no token at all."""
    for mask in (torch.ones(4, 3), torch.zeros(4, 3), torch.eye(4)[:, :3], torch.eye(4)[:1, :3].expand(4, 3)):
        for groups in (list("abcd"), list("aaaa"), list("aabb")):
            batch = {**batch_of(0, 4, 3), "response_mask": mask.long(), "index": groups}
            batch |= {key: poison(torch.ones(4, 3), mask) for key in TENSORS}
            for result in call(name, batch):
                assert torch.isfinite(result).all() and (result[mask == 0] == 0).all()


def test_every_estimator_gives_its_own_digest_on_one_batch():
    """Equal by definition: each vectorized name is the estimator itself."""
    batch, digests = batch_of(11, 24, 8, num_groups=5), {}
    for name in NAMES:
        content = torch.cat([call(name, batch)[0].flatten()]).numpy().round(9) + 0.0
        digests.setdefault(hashlib.sha256(content.tobytes()).hexdigest(), set()).add(name)
    shared = [names for names in digests.values() if len(names) > 1]
    assert sorted(map(sorted, shared)) == [["grpo", "grpo_vectorized"], ["rloo", "rloo_vectorized"]]


@pytest.mark.parametrize(
    ("name", "missing", "hint"),
    [
        ("gae", "values", "critic.enable=true"),
        ("vapo", "values", "critic.enable=true"),
        ("remax", "reward_baselines", "greedy response"),
        ("optimal_token_baseline", "sum_pi_squared", "calculate_sum_pi_squared=true"),
        ("tir_optimal_token_baseline", "old_log_probs", "pass of the actor"),
        ("grpo", "index", "uid"),
    ],
)
def test_a_missing_input_is_named_with_where_it_comes_from(name, missing, hint):
    with pytest.raises(ConfigError, match=f"requires '{missing}'.*{hint}"):
        call(name, {**batch_of(0, 4, 3), missing: None})


@pytest.mark.parametrize("wrong", ["values", "token_level_rewards", "index"])
def test_a_wrong_shape_is_an_error_that_says_both_shapes(wrong):
    batch = batch_of(0, 4, 3)
    batch[wrong] = list("ab") if wrong == "index" else torch.zeros(4, 2)
    with pytest.raises(ValueError, match="2 group ids for 4 rows" if wrong == "index" else r"one shape.*\(4, 2\)"):
        call("grpo" if wrong == "index" else "gae", batch)

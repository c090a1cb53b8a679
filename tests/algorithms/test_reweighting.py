import numpy as np
import pytest
import torch

from verl.algorithms.reweighting import resampled_rows, reweight_probabilities
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_pf_ppo_reweight_data

SCORES = torch.tensor([1.0, 0.5, 0.0])


@pytest.mark.parametrize(
    ("method", "expected"),
    [("pow", [0.8, 0.2, 0]), ("max_min", [0.5, 0, 0.5]), ("max_random", [2 / 3, 1 / 6, 1 / 6])],
)
def test_worked_probabilities(method, expected):
    assert reweight_probabilities(SCORES, method).tolist() == pytest.approx(expected, abs=1e-7)


def test_the_power_is_a_setting_and_its_base_is_the_absolute_score():
    assert reweight_probabilities(torch.tensor([-1.0, 3.0]), "pow", 1.0).tolist() == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_equal_scores_are_drawn_evenly_and_nan_never(method):
    assert reweight_probabilities(torch.zeros(4), method).tolist() == pytest.approx([0.25] * 4)
    assert reweight_probabilities(torch.full((2,), torch.nan), method).tolist() == [0.5, 0.5]
    assert reweight_probabilities(torch.tensor([1.0, torch.nan]), method).tolist() == [1, 0]


def test_a_seed_draws_the_same_rows_again_in_the_right_shares():
    rows = resampled_rows(SCORES.repeat(1000), "pow", seed=7)
    assert torch.equal(rows, resampled_rows(SCORES.repeat(1000), "pow", seed=7))
    shares = torch.bincount(rows % 3, minlength=3) / len(rows)
    assert shares.tolist() == pytest.approx([0.8, 0.2, 0], abs=0.03)


def test_an_unknown_method_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"reweight_method.*Did you mean 'max_min'"):
        reweight_probabilities(SCORES, "maxmin")


def test_every_field_of_a_batch_is_gathered_with_its_row():
    scores = torch.zeros(6, 2)
    scores[2, 1] = 1.0
    data = DataProto.from_dict(
        tensors={"token_level_scores": scores, "responses": torch.arange(6)[:, None].expand(6, 2)},
        non_tensors={"uid": np.array(list("abcdef"), dtype=object)},
    )
    torch.manual_seed(0)
    found = compute_pf_ppo_reweight_data(data, "pow", 2.0)
    assert found.batch["responses"][:, 0].tolist() == [2] * 6 and found.non_tensor_batch["uid"].tolist() == ["c"] * 6

import math

import pytest
import torch

from tests.harness.algorithms import poison
from verl.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten, zero_outside
from verl.metrics import notices

MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])
VALUES = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 6.0]])


def test_reductions_see_only_the_valid_positions():
    assert masked_sum(VALUES, MASK) == 12
    assert masked_mean(VALUES, MASK) == pytest.approx(3)
    assert masked_mean(VALUES, MASK, axis=-1).tolist() == pytest.approx([1.5, 4.5])
    assert masked_sum(VALUES, MASK, axis=0).tolist() == [4, 2, 6]
    assert masked_var(VALUES, MASK) == pytest.approx((4 + 1 + 0 + 9) / 3)
    assert masked_var(VALUES, MASK, unbiased=False) == pytest.approx(14 / 4)


def test_whitened_values_have_mean_zero_and_variance_one_and_are_zero_outside():
    white = masked_whiten(VALUES, MASK)
    assert masked_mean(white, MASK) == pytest.approx(0, abs=1e-6)
    assert masked_var(white, MASK) == pytest.approx(1, abs=1e-5)
    assert white[MASK == 0].tolist() == [0, 0]
    kept = masked_whiten(VALUES, MASK, shift_mean=False)
    assert masked_mean(kept, MASK) == pytest.approx(3)


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_var, masked_whiten])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_junk_outside_the_mask_does_not_leak_into_value_or_gradient(function, junk):
    values = torch.where(MASK.bool(), VALUES, junk).requires_grad_()
    result = function(values, MASK)
    assert torch.equal(result, function(VALUES, MASK))
    result.sum().backward()
    assert torch.isfinite(values.grad).all() and (values.grad[MASK == 0] == 0).all()


def test_half_precision_is_computed_in_float32_and_float64_stays():
    assert zero_outside(VALUES.bfloat16(), MASK).dtype == torch.float32
    assert zero_outside(VALUES.double(), MASK).dtype == torch.float64
    many = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert masked_sum(many, torch.ones(1, 4096)) == 4096  # bfloat16 would stop counting at 256


def test_a_variance_of_fewer_than_two_values_is_an_error_by_name():
    for mask in (torch.zeros_like(MASK), torch.tensor([[0, 1, 0], [0, 0, 0]])):
        with pytest.raises(ValueError, match="at least 2 valid positions"):
            masked_var(VALUES, mask)


def test_whitening_fewer_than_two_values_centres_them_and_says_so():
    one = torch.tensor([[0, 1, 0], [0, 0, 0]])
    assert masked_whiten(poison(VALUES, one), one).abs().max() < 1e-6
    assert masked_whiten(VALUES, torch.zeros_like(MASK)).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert "fewer than 2 valid tokens" in notices()["advantages"]

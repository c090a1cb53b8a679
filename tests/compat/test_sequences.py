import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.compat.forms.sequences import (
    clip_by_value,
    compute_grad_norm,
    compute_position_id_with_mask,
    create_random_mask,
    get_response_mask,
    pad_2d_list_to_length,
    pad_sequence_to_length,
    postprocess_data,
    tokenize_and_postprocess_data,
)
from verl.errors import ConfigError, DataError


def test_the_mask_ends_with_the_first_of_several_stop_tokens():
    ids = torch.tensor([[5, 2, 2, 7], [5, 6, 7, 8], [2, 0, 0, 0], [5, 9, 6, 2]])
    assert get_response_mask(ids).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert get_response_mask(ids, [2, 9]).tolist()[3] == [1, 1, 0, 0]
    assert get_response_mask(ids, dtype=torch.bool).dtype == torch.bool


def test_positions_count_real_tokens_after_left_padding():
    assert compute_position_id_with_mask(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist() == [
        [0, 0, 0, 1],
        [0, 1, 2, 2],
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 30))
def test_random_masks_are_one_run_of_ones_within_the_ratios(seed, width):
    torch.manual_seed(seed)
    mask = create_random_mask(torch.zeros(8, width, dtype=torch.long), 0.8, 0.3, 0.2)
    for row in mask:
        ones = row.nonzero().squeeze(-1)
        assert ones[-1] - ones[0] + 1 == len(ones)
        assert max(1, int(0.2 * width)) <= len(ones) <= max(1, int(0.8 * width), int(0.2 * width))
        assert ones[0] <= 0.3 * width
    with pytest.raises(ConfigError, match="min <= max"):
        create_random_mask(torch.zeros(1, 4), 0.2, 0.1, 0.5)


def test_padding_of_tensors_and_lists():
    ids = torch.tensor([[1, 2]])
    assert pad_sequence_to_length(ids, 4, 9).tolist() == [[1, 2, 9, 9]]
    assert pad_sequence_to_length(ids, 4, 9, left_pad=True).tolist() == [[9, 9, 1, 2]]
    assert pad_sequence_to_length(ids, 1, 9) is ids
    assert pad_2d_list_to_length([[1], [2, 3]], 0).tolist() == [[1, 0], [2, 3]]
    assert pad_2d_list_to_length([[1], [2, 3]], 0, max_length=3).tolist() == [[1, 0, 0], [2, 3, 0]]


@pytest.mark.parametrize(("truncation", "kept"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])])
def test_truncation_drops_the_named_side(truncation, kept):
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    found, mask = postprocess_data(ids, torch.ones_like(ids), 3, 0, truncation=truncation)
    assert found.tolist() == [kept] and mask.tolist() == [[1, 1, 1]]


def test_short_rows_are_padded_and_long_ones_are_an_error_that_says_what_to_set():
    ids = torch.tensor([[1, 2]])
    found, mask = postprocess_data(ids, torch.ones_like(ids), 3, 0)
    assert found.tolist() == [[0, 1, 2]] and mask.tolist() == [[0, 1, 1]]
    with pytest.raises(DataError, match=r"2 tokens is longer than 1.*data\.truncation"):
        postprocess_data(ids, torch.ones_like(ids), 1, 0)
    with pytest.raises(ConfigError, match=r"data\.truncation.*'center'"):
        postprocess_data(ids, torch.ones_like(ids), 1, 0, truncation="center")


def test_a_prompt_is_tokenized_without_special_tokens():
    def tokenizer(text, return_tensors, add_special_tokens):
        assert return_tensors == "pt" and not add_special_tokens
        ids = torch.tensor([[ord(c) for c in text]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    ids, mask = tokenize_and_postprocess_data("ab", tokenizer, 3, 0)
    assert ids.tolist() == [[0, 97, 98]] and mask.tolist() == [[0, 1, 1]]


def test_gradient_norm_and_clipping():
    model = torch.nn.Linear(2, 1)
    assert compute_grad_norm(model) == 0
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0]]), torch.tensor([4.0])
    assert compute_grad_norm(model) == pytest.approx(5)
    x = torch.tensor([-1.0, 0.5, 2])
    assert clip_by_value(x, torch.zeros(3), torch.ones(3)).tolist() == [0, 0.5, 1]

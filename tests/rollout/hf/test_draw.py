"""Tokens by inverse CDF: hand-made distributions, the edges of the unit interval, filters and their log-probs."""

from __future__ import annotations

import math

import pytest
import torch

from verl.rollout import SamplingParams
from verl.rollout.hf import draw as draw_module
from verl.rollout.hf.draw import BLOCK, DrawColumns, draw_tokens, keep_top_k, keep_top_p

PROBS = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3])
LOGITS = PROBS.log()
BELOW_ONE = 1 - 2**-53


def drawn(logits: torch.Tensor, numbers: list[float], **sampling) -> tuple[list[int], list[float]]:
    rows = logits.expand(len(numbers), -1)
    columns = DrawColumns.of([SamplingParams(**sampling)] * len(numbers), logits.device)
    tokens, log_probs = draw_tokens(rows, torch.tensor(numbers, dtype=torch.float64), columns)
    return tokens.tolist(), log_probs.tolist()


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_number():
    numbers = [0.0, 0.0999, 0.1001, 0.4999, 0.5001, 0.6999, 0.7001, BELOW_ONE]
    tokens, log_probs = drawn(LOGITS, numbers)
    assert tokens == [0, 0, 2, 2, 3, 3, 4, 4]
    torch.testing.assert_close(torch.tensor(log_probs), PROBS[tokens].log(), atol=1e-6, rtol=0)


def test_a_token_of_probability_zero_is_never_drawn():
    numbers = torch.linspace(0, BELOW_ONE, 2001, dtype=torch.float64).tolist()
    for zeros in ([0], [4], [0, 1, 2], [1, 2, 3, 4], [3, 4]):
        logits = torch.zeros(5).index_fill(0, torch.tensor(zeros), float("-inf"))
        assert not set(drawn(logits, numbers)[0]) & set(zeros)


def test_both_levels_of_the_sum_agree_with_a_plain_cumulative_sum():
    generator = torch.Generator().manual_seed(0)
    for vocab in (3, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 17):
        logits = 3 * torch.randn(64, vocab, generator=generator)
        numbers = torch.rand(64, generator=generator, dtype=torch.float64)
        tokens, log_probs = draw_tokens(logits, numbers, DrawColumns(None, None, None, None))
        exact = logits.double().softmax(-1)
        cumulative = exact.cumsum(-1).gather(-1, tokens[:, None])[:, 0]
        chosen = exact.gather(-1, tokens[:, None])[:, 0]
        assert bool(((cumulative > numbers - 1e-6) & (cumulative - chosen < numbers + 1e-6)).all())
        torch.testing.assert_close(log_probs.double(), chosen.log(), atol=2e-6, rtol=0)


def test_numbers_at_the_seams_of_blocks_find_tokens_with_mass():
    logits = torch.full((4 * BLOCK,), float("-inf"))
    logits[[BLOCK - 1, 3 * BLOCK]] = 0.0
    edges = [0.0, math.nextafter(0.5, 0), 0.5, math.nextafter(0.5, 1), BELOW_ONE]
    assert drawn(logits, edges)[0] == [BLOCK - 1, BLOCK - 1, 3 * BLOCK, 3 * BLOCK, 3 * BLOCK]


def test_temperature_divides_the_logits_before_everything():
    _, log_probs = drawn(torch.tensor([0.0, 1.0]), [0.0], temperature=0.5)
    assert log_probs[0] == pytest.approx(-math.log(1 + math.e**2), abs=1e-6)


def test_top_p_keeps_the_shortest_run_that_reaches_it_and_renormalises():
    # Sorted: 0.4, 0.3, 0.2, 0.1. The run of 0.75 is the first three; of 0.7 the first two.
    tokens, log_probs = drawn(LOGITS, [0.0, 0.5, BELOW_ONE], top_p=0.75)
    assert tokens == [2, 3, 4]
    expected = torch.tensor([0.4, 0.2, 0.3]).div(0.9).log()
    torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-6, rtol=0)
    kept = keep_top_p(LOGITS[None], torch.tensor([0.69999], dtype=torch.float64)).isfinite()
    assert kept.tolist() == [[False, False, True, False, True]]


def test_top_p_breaks_ties_by_token_id_and_never_empties_a_row():
    kept = keep_top_p(torch.zeros(2, 4), torch.tensor([0.5, 1e-9], dtype=torch.float64)).isfinite()
    assert kept.tolist() == [[True, True, False, False], [True, False, False, False]]


def test_top_k_keeps_ties_with_the_last_one_and_rows_may_differ():
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0]]).repeat(4, 1)
    kept = keep_top_k(scores, torch.tensor([1, 2, -1, 9])).isfinite()
    assert kept.sum(-1).tolist() == [1, 3, 4, 4]


def test_top_p_takes_its_share_of_what_top_k_left():
    # top_k=3 leaves 0.4, 0.3, 0.2; of these 0.44 + 0.33 reaches 0.7, where of all five it would take all three.
    tokens, log_probs = drawn(LOGITS, [0.0, BELOW_ONE], top_k=3, top_p=0.71)
    assert tokens == [2, 4]
    assert log_probs == pytest.approx([math.log(4 / 7), math.log(3 / 7)], abs=1e-6)


def test_greedy_takes_the_largest_and_reports_its_unfiltered_log_prob():
    tokens, log_probs = drawn(LOGITS, [0.0, 0.99], temperature=0.0, top_k=1)
    assert tokens == [2, 2]
    assert log_probs == pytest.approx([math.log(0.4)] * 2, abs=1e-6)


def test_rows_of_one_batch_have_their_own_settings():
    kinds = [
        SamplingParams(),
        SamplingParams(do_sample=False),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.35),
        SamplingParams(temperature=2.0),
    ]
    columns = DrawColumns.of(kinds, LOGITS.device)
    tokens, log_probs = draw_tokens(LOGITS.expand(5, -1), torch.zeros(5, dtype=torch.float64), columns)
    assert tokens.tolist() == [0, 2, 2, 2, 0]
    root = PROBS.sqrt() / PROBS.sqrt().sum()
    expected = torch.tensor([0.1, 0.4, 1.0, 1.0, root[0].item()]).log()
    torch.testing.assert_close(log_probs, expected, atol=1e-6, rtol=0)


def test_frequencies_match_the_exact_probabilities_of_the_filtered_distribution():
    logits = torch.tensor([1.5, 0.2, -0.3, 0.9, -1.0, 0.0])
    settings = {"temperature": 0.8, "top_k": 5, "top_p": 0.93}
    generator = torch.Generator().manual_seed(3)
    numbers = torch.rand(20_000, generator=generator, dtype=torch.float64).tolist()
    counts = torch.tensor(drawn(logits, numbers, **settings)[0]).bincount(minlength=6).double()
    scaled = (logits / 0.8).double()
    scaled[4] = float("-inf")  # the smallest of six falls to top_k=5
    order = scaled.softmax(-1).sort(descending=True)
    kept = order.indices[: int((order.values.cumsum(0) < 0.93).sum()) + 1]
    exact = torch.zeros(6, dtype=torch.float64).index_copy(0, kept, scaled[kept].softmax(-1))
    assert counts[exact == 0].sum() == 0
    expected = 20_000 * exact[kept]
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum().item()
    assert len(kept) == 4 and chi_square < 16.3  # 99.9 % quantile with 3 degrees of freedom


def test_logits_that_are_not_finite_give_a_log_prob_that_is_not_finite():
    for bad in (float("nan"), float("inf")):
        assert not math.isfinite(drawn(torch.tensor([0.0, bad]), [0.5])[1][0])
    assert not math.isfinite(drawn(torch.full((3,), float("-inf")), [0.5])[1][0])


def test_many_rows_are_drawn_in_slices_with_the_same_result(monkeypatch):
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    numbers = torch.rand(20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    columns = DrawColumns.of([SamplingParams(temperature=1 + i / 10, top_k=i) for i in range(20)], logits.device)
    whole = draw_tokens(logits, numbers, columns)
    monkeypatch.setattr("verl.rollout.hf.draw.MAX_ELEMENTS", 150)
    sliced = draw_tokens(logits, numbers, columns)
    assert torch.equal(whole[0], sliced[0]) and torch.equal(whole[1], sliced[1])


@pytest.mark.parametrize("vocab", [5, 300, 512])
def test_the_quick_inversion_finds_what_the_careful_one_finds(vocab, monkeypatch):
    torch.manual_seed(vocab)
    logits = 4 * torch.randn(4000, vocab)
    logits[torch.rand(logits.shape) < 0.3] = float("-inf")
    logits[:, 0] = 0.0
    uniforms = torch.rand(4000, dtype=torch.float64)
    uniforms[:8], uniforms[8:16] = 0.0, 1 - 2.0**-53
    columns = DrawColumns.of([SamplingParams()] * 4000, torch.device("cpu"))
    quick = draw_tokens(logits, uniforms, columns)
    one_by_one = [
        draw_tokens(logits[i : i + 1], uniforms[i : i + 1], columns.slice(slice(i, i + 1))) for i in range(100)
    ]
    monkeypatch.setattr(draw_module, "_invert_without_rounding", lambda *arguments: (None, 0.0))
    careful = draw_tokens(logits, uniforms, columns)
    assert torch.equal(quick[0], careful[0]) and torch.equal(quick[1], careful[1])
    assert torch.equal(torch.cat([tokens for tokens, _ in one_by_one]), careful[0][:100])


def test_an_excluded_token_is_never_drawn_and_keeps_its_share_of_the_sum():
    """Of 0.1, 0, 0.4, 0.2, 0.3 the third is out: the others share the numbers, and keep their probabilities."""
    numbers = [0.0, 0.1666, 0.1667, 0.4999, 0.5001, BELOW_ONE]
    rows = LOGITS.expand(len(numbers), -1)
    columns = DrawColumns.of([SamplingParams()] * len(numbers), LOGITS.device)
    tokens, log_probs = draw_tokens(rows, torch.tensor(numbers, dtype=torch.float64), columns, torch.tensor([2]))
    assert tokens.tolist() == [0, 0, 3, 3, 4, 4]
    torch.testing.assert_close(log_probs, PROBS[tokens].log(), atol=1e-6, rtol=0)


def test_greedy_passes_over_an_excluded_token():
    columns = DrawColumns.of([SamplingParams(temperature=0.0)], LOGITS.device)
    tokens, log_probs = draw_tokens(LOGITS[None], torch.tensor([0.5], dtype=torch.float64), columns, torch.tensor([2]))
    assert tokens.tolist() == [4] and log_probs.item() == pytest.approx(math.log(0.3), abs=1e-6)

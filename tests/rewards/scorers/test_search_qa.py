"""Search question answering: the last answer element, compared by SQuAD's rules."""

from __future__ import annotations

import numpy as np
import pytest

from verl.rewards.scorers.search_qa import compute_score, compute_score_subem, extract_solution, normalize_answer


def test_case_punctuation_and_articles_do_not_count():
    assert normalize_answer("The Beatles!") == "beatles"
    assert normalize_answer("a  theory of an  Axe") == "theory of axe"
    assert compute_score("<answer>The Beatles!</answer>", {"target": "beatles"}) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>A</answer> … <answer>B</answer>", "B"),
        ("<answer>\n two\nlines </answer>", "two\nlines"),
        ("<answer>never closed", None),
        ("<answer>A</answer><answer>B", "A"),
        ("<answer>x<answer>y</answer>", "x<answer>y"),
        ("nothing", None),
        ("<answer>A</answer>, as I was to put it between <answer></answer>", "A"),
        ("I write <answer> and </answer>. <answer>A</answer>", "A"),
    ],
)
def test_the_last_closed_element_is_the_answer(text, answer):
    assert extract_solution(text) == answer


@pytest.mark.parametrize("target", [["x", "Rome"], np.array(["x", "Rome"], dtype=object), "Rome", ("Rome",)])
def test_any_gold_answer_counts_whatever_holds_them(target):
    assert compute_score("<answer>rome.</answer>", {"target": target}) == 1.0
    assert compute_score("<answer>Paris</answer>", {"target": target}, format_score=0.2) == 0.2


def test_no_gold_and_no_answer_score_nothing():
    assert compute_score("<answer>Rome</answer>", {"target": []}) == 0.0
    assert compute_score("<answer>Rome</answer>", {}) == 0.0
    assert compute_score("Rome", {"target": "Rome"}, format_score=0.5) == 0.0


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("-5", "5", False), ("5", "-5", False), ("-5", "-5", True), ("\u22125", "-5", True), ("-.5", "0.5", False),
        ("it is -5 degrees", "it is 5 degrees", False), ("covid-19", "covid 19", False), ("COVID-19", "covid19", True),
        ("2010-2015", "2010 2015", True), ("well-known", "wellknown", True), ("- Rome", "rome", True),
    ],
)  # fmt: skip
def test_a_minus_sign_belongs_to_its_number(answer, gold, same):
    assert bool(compute_score(f"<answer>{answer}</answer>", {"target": gold})) is same


@pytest.mark.parametrize(
    ("answer", "right"), [("it is 5.", 1), ("-5", 0), ("15", 0), ("5.5", 0), ("50", 0), ("5th", 1)]
)
def test_the_substring_variant_does_not_cut_numbers(answer, right):
    assert compute_score_subem(f"<answer>{answer}</answer>", {"target": "5"}) == right


def test_more_than_ten_tags_cost_three_quarters():
    assert compute_score("<answer>Rome</answer>" * 10, {"target": "Rome"}) == 1.0
    assert compute_score("<answer>Rome</answer>" * 11, {"target": "Rome"}) == 0.25
    assert compute_score("<answer>Rome</answer>" + "</answer>" * 10, {"target": "Rome"}) == 0.25


def test_the_substring_variant_finds_gold_inside_the_answer():
    assert compute_score_subem("<answer>in Rome, Italy</answer>", {"target": "Rome"}) == 1.0
    assert compute_score("<answer>in Rome, Italy</answer>", {"target": "Rome"}) == 0.0

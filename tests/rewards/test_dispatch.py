"""Which scorer a data source gets, what is said where there is none, and that no text of a model breaks a scorer."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards import dispatch
from verl.rewards.dispatch import (
    PREFIXES,
    SCORERS,
    check_data_sources,
    default_compute_score,
    known_data_sources,
    waits,
)
from verl.sandbox import Outcome

SOURCES = [*SCORERS, "aime2024", "searchR1_nq"]
TAGGED = ["lmms-lab/multimodal-open-r1-8k-verified", "Zhang199/TinyLLaVA-Video-R1-training-data"]
QUICK = [source for source in SOURCES if not waits(source)]


@pytest.mark.parametrize(
    ("source", "answer", "truth", "score"),
    [
        ("openai/gsm8k", "#### 18", "18", 1.0),
        ("lighteval/MATH", r"\boxed{18}", "18", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{18}", "18", 1.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{18}", "18", 1.0),
        ("hiyouga/geometry3k", r"<think></think>\boxed{18}", "18", 1.0),
        (
            "lmms-lab/multimodal-open-r1-8k-verified",
            "<think>so</think> <answer>36/2</answer>",
            "<answer>18</answer>",
            0.1,
        ),
        ("lmms-lab/multimodal-open-r1-8k-verified", "it is <answer>$18$</answer>", "<answer> 18 </answer>", 0.9),
        ("Zhang199/TinyLLaVA-Video-R1-training-data", "so <answer> b </answer>", "<answer>B</answer>", 1.0),
        ("searchR1_hotpotqa", "<answer>18</answer>", {"target": ["18"]}, 1.0),
    ],
)
def test_each_data_source_has_its_scorer(source, answer, truth, score):
    assert default_compute_score(source, answer, truth) == score
    assert default_compute_score(source, "no idea", truth) == 0.0


@pytest.mark.parametrize("source", ["math_dapo", "math", "math_dapo_reasoning", "aime24", "aime_2025"])
def test_dapo_sources_return_a_dict(source):
    assert default_compute_score(source, "Answer: 3", "3") == {"score": 1.0, "acc": True, "pred": "3"}


def test_options_reach_the_scorer_that_has_them():
    assert default_compute_score("openai/gsm8k", "it is 5", "5", method="flexible") == 1.0
    assert default_compute_score("lighteval/MATH", r"\boxed{5}", "5", method="flexible") == 1.0
    assert default_compute_score("math", r"\boxed{5}", "5", strict_box_verify=True)["acc"]


@pytest.mark.parametrize("source", ["numina_olympiads", "numina_cn_k12", "numina_amc_aime", "numina_aops_forum"])
def test_the_numina_family_compares_formulas(source):
    assert default_compute_score(source, r"\boxed{\frac{\sqrt8}{2}}", r"\sqrt{2}")["score"] == 1.0
    assert default_compute_score(source, r"\boxed{2}", r"\sqrt{2}")["acc"] is False


@pytest.mark.parametrize("source", ["codecontests", "apps", "codeforces", "taco"])
def test_programs_are_scored_by_whoever_runs_them(source, monkeypatch):
    class Echo:
        def run(self, code, stdin, seconds):
            return Outcome("ok", stdin)

    asked = []
    monkeypatch.setattr(dispatch, "code_runner", lambda *given: asked.append(given) or Echo())
    tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "4"]}
    found = default_compute_score(source, "x", tests, sandbox_fusion_url="http://s", memory_limit_mb=9)
    assert (found["score"], found["acc"], found["passed"]) == (pytest.approx(2 / 3), False, 2)
    assert asked == [("http://s", 64, 9, None, ())]
    assert default_compute_score(source, "x", tests, continuous=False)["score"] == 0.0


def test_only_scorers_that_ask_another_process_wait():
    slow = [
        "hiyouga/geometry3k",
        "lmms-lab/multimodal-open-r1-8k-verified",
        "codecontests",
        "apps",
        "codeforces",
        "taco",
    ]
    assert [source for source in SOURCES if waits(source)] == slow
    assert waits("numina_synthetic_math") and not waits("haiku") and not waits(None)


@pytest.mark.parametrize(("source", "near"), [("openai/gsm8K", "openai/gsm8k"), ("gsm8k", "openai/gsm8k")])
def test_an_unknown_source_names_the_nearest_one_and_both_ways_out(source, near):
    with pytest.raises(RewardError) as caught:
        default_compute_score(source, "x", "y")
    text = str(caught.value)
    assert f"Did you mean {near!r}" in text
    assert "reward.custom_reward_function.path" in text and "one of these names" in text
    assert all(name in text for name in known_data_sources())


def test_a_missing_column_names_both_ways_out():
    with pytest.raises(RewardError) as caught:
        check_data_sources(None)
    assert "reward.custom_reward_function.path" in str(caught.value)
    assert "add a column 'data_source'" in str(caught.value)
    with pytest.raises(RewardError, match="data_source"):
        check_data_sources(["openai/gsm8k", None])
    check_data_sources(["openai/gsm8k", "aime24"])


FRAGMENTS = st.sampled_from(
    [*(r"\boxed{", r"\boxed ", r"\fbox{", "}", "{", "$", "#### ", "-1,2.3", "Answer:", "<answer>", "</answer>"),
     *(r"\frac", r"\sqrt", r"\text{ ", r"\text{", "<think>", "</think>", "=", "/", "\n", " ", "²", "\ud800", "\x00")]
)  # fmt: skip
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=5)), max_size=30).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(TEXTS, st.binary(max_size=200).map(lambda b: b.decode("latin-1"))), truth=TEXTS)
def test_no_text_makes_a_scorer_raise(text, truth):
    for source in [*QUICK, "hiyouga/geometry3k", *TAGGED[:1]]:
        result = default_compute_score(source, text, truth)
        score = result["score"] if isinstance(result, dict) else result
        assert -1.0 <= score <= 1.0


@pytest.mark.parametrize(
    "piece",
    [r"\boxed{", r"\boxed{1}", r"\frac", r"\sqrt", "<answer>", "</answer>", "<think></think>", "Answer: ", "9", "#### ",
     "{", "}", r"\text{ ", "$", ",", " a", r"\frac1", r"\boxed "],
)  # fmt: skip
def test_a_megabyte_of_anything_is_scored_in_bounded_time(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    for source in ("openai/gsm8k", "lighteval/MATH", "math", "hiyouga/geometry3k", "searchR1_nq", *TAGGED):
        default_compute_score(source, text, "18")
        default_compute_score(source, text, text[:5000])
    assert time.process_time() - start < 5.0  # well under a second each; quadratic would be hours


def test_the_tables_name_no_source_twice():
    assert not [source for source in SCORERS if source.startswith(tuple(PREFIXES))]

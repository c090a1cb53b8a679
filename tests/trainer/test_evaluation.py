"""Evaluation: estimators against counts by hand, files that are wrong, two runs against each other."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.harness.rows import write_prompts
from tests.harness.sandboxes import HERE
from verl.config import load_config
from verl.errors import ConfigError
from verl.metrics import notices
from verl.rewards import programs as places
from verl.trainer import main_eval
from verl.trainer.evaluation import interval, pass_at_k

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "crash":
        raise ValueError("cannot read this")
    return {"score": float(solution_str == ground_truth) + bonus, "pred": solution_str}
"""
TRUTHS = ["1", "2", "3"]
GIVEN = [["1", "1", "9", "9"], ["2", "8", "8", "8"], ["7", "7", "7", "7"]]


def write(name: str, answers: list, truths: list[str] = TRUTHS, source: str | None = "sums") -> str:
    rows = [
        {"prompt": f"question {i}", "reward_model": {"ground_truth": truth}, "responses": given}
        | ({"data_source": source} if source else {})
        for i, (given, truth) in enumerate(zip(answers, truths, strict=True))
    ]
    write_prompts(name, rows)
    return name


@pytest.fixture
def here(workplace: Path) -> Path:
    Path("scorer.py").write_text(SCORER)
    return workplace


def evaluate(*words: str) -> dict:
    settings = {"custom_reward_function.path": "scorer.py", "report.json": "report.json", "report.num_workers": "1"}
    settings |= dict(word.split("=", 1) for word in words)
    assert main_eval.main([f"{key}={value}" for key, value in settings.items()]) == 0
    return json.loads(Path("report.json").read_text())


@pytest.mark.parametrize(("n", "right"), [(4, 1), (5, 2), (6, 0), (3, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n, right):
    found = pass_at_k({0: [i < right for i in range(n)]})
    for name, value in found.items():
        k = int(name.removeprefix("pass@"))
        subsets = list(combinations(range(n), k))
        assert value == pytest.approx(sum(min(subset) < right for subset in subsets) / len(subsets))
    assert list(found) == [f"pass@{k}" for k in (1, 2, 4) if k < n] + [f"pass@{n}"]


def test_pass_at_k_leaves_out_prompts_with_fewer_answers():
    assert pass_at_k({0: [True, False], 1: [False]}) == {"pass@1": 0.25, "pass@2": 1.0}
    assert pass_at_k({0: []}) == {}


def test_an_interval_holds_the_mean_and_is_a_point_where_nothing_varies():
    low, high = interval([0.0, 1.0] * 50, seed=1)
    assert 0.35 < low < 0.5 < high < 0.65
    assert interval([0.5] * 7, seed=1) == (0.5, 0.5)
    assert all(math.isnan(bound) for bound in interval([], seed=1))


def test_the_report_counts_prompts_answers_and_right_ones(here, capsys):
    found = evaluate(f"data.path={write('out.parquet', GIVEN)}", "report.markdown=report.md")
    one = found["data_sources"]["sums"]
    assert (one["prompts"], one["answers"], one["unscorable"]) == (3, 12, 0)
    assert found["test_score/sums"] == pytest.approx((0.5 + 0.25 + 0.0) / 3) == one["mean"]
    assert one["metrics"]["pass@1"] == pytest.approx(0.25)
    assert one["metrics"]["pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 0) / 3)
    assert one["metrics"]["pass@4"] == pytest.approx(2 / 3)
    assert one["metrics"]["score/mean@4"] == pytest.approx(0.25)
    assert one["metrics"]["score/best@4/mean"] < 2 / 3 < 1, "drawn with replacement, a right answer can be missed"
    assert "score/maj@4/mean" in one["metrics"]
    assert Path("report.md").read_text() in capsys.readouterr().out
    assert "| sums | 3 | 12 | 0.2500 |" in Path("report.md").read_text()


def test_every_answer_is_a_row_of_the_table(here):
    evaluate(f"data.path={write('out.parquet', GIVEN)}", "report.samples=samples.parquet")
    rows = pq.read_table("samples.parquet").to_pylist()
    assert len(rows) == 12
    assert rows[0] | {"prompt": "'question 0'", "response": "1", "score": 1.0, "pred": "1"} == rows[0]
    assert [row["row"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4


def test_an_answer_that_cannot_be_scored_is_counted_and_told(here):
    found = evaluate(f"data.path={write('out.parquet', [['1', 'crash'], ['2', '2'], ['3', '3']])}")
    one = found["data_sources"]["sums"]
    assert one["unscorable"] == 1 and one["mean"] == 1.0
    assert "1 of 6 answers have no score" in notices()["data.path"] and "cannot read this" in notices()["data.path"]


def test_a_report_of_answers_that_all_have_no_score_is_json_all_the_same(here):
    evaluate(f"data.path={write('out.parquet', [['crash'], ['crash'], ['crash']])}")

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(Path("report.json").read_text(), parse_constant=refuse)
    assert found["test_score/sums"] is None and found["data_sources"]["sums"]["interval"] == [None, None]


def test_programs_are_scored_in_the_sandbox(here, monkeypatch):
    real = places.default_pool  # where a layer is missing, programs run without it
    monkeypatch.setattr(places, "default_pool", lambda allow=(): real(allow or HERE["allow_missing"]))
    tests = [{"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}] * 2
    programs = ["```python\nprint(sum(map(int, input().split())))\n```", "```python\nprint(3)\n```"]
    rows = [
        {
            "prompt": f"q{i}",
            "data_source": "taco",
            "reward_model": {"ground_truth": json.dumps(test)},
            "responses": [text],
        }
        for i, (test, text) in enumerate(zip(tests, programs))
    ]
    write_prompts("out.parquet", rows)
    words = ["data.path=out.parquet", "report.json=report.json", "report.samples=samples.parquet"]
    assert main_eval.main(words) == 0
    one = json.loads(Path("report.json").read_text())["data_sources"]["taco"]
    assert one["mean"] == pytest.approx(0.75) and one["metrics"]["pass@1"] == 0.5
    assert [row["score"] for row in pq.read_table("samples.parquet").to_pylist()] == [1.0, 0.5]


def test_built_in_scorers_are_picked_by_the_data_source(here):
    name = write("out.parquet", ["#### 1", "#### 5", "no number"], source="openai/gsm8k")
    assert main_eval.main([f"data.path={name}", "report.json=report.json"]) == 0
    one = json.loads(Path("report.json").read_text())["data_sources"]["openai/gsm8k"]
    assert one["mean"] == pytest.approx(1 / 3) and next(iter(one["metrics"])) == "pass@1"


def test_a_missing_truth_is_refused_unless_the_data_set_is_said_to_have_none(here, capsys):
    write("out.parquet", GIVEN, truths=[None] * len(GIVEN))
    words = ["data.path=out.parquet", "custom_reward_function.path=free.py", "report.json=report.json"]
    Path("free.py").write_text(
        "def compute_score(solution_str, ground_truth):\n    return float(ground_truth is None)\n"
    )
    assert main_eval.main(words) == 2
    assert (
        "has no ground truth, and compute_score" in (said := capsys.readouterr().err) and "reward.ground_truth" in said
    )
    assert main_eval.main([*words, "reward.ground_truth=none"]) == 0
    assert json.loads(Path("report.json").read_text())["test_score/sums"] == 1.0
    assert main_eval.main(["data.path=out.parquet", "reward.ground_truth=none"]) == 2
    assert "the built-in scorers compare with ground truths" in capsys.readouterr().err


def test_keyword_arguments_reach_the_scorer_and_say_from_where_an_answer_is_right(here):
    name = write("out.parquet", GIVEN)
    found = evaluate(f"data.path={name}", "custom_reward_function.reward_kwargs={bonus: 0.5}", "report.right_from=1.5")
    one = found["data_sources"]["sums"]
    assert one["mean"] == pytest.approx(0.75) and one["metrics"]["pass@4"] == pytest.approx(2 / 3)


def test_two_runs_are_compared_prompt_by_prompt_whatever_their_order(here):
    best = write("best.parquet", [["1"], ["2"], ["3"]])
    pq.write_table(pq.read_table(write("other.parquet", GIVEN)).take([2, 0, 1]), "other.parquet")
    found = evaluate(f"data.path={best}", "report.compare=other.parquet")
    gap = found["differences"]["sums"]
    assert gap["prompts"] == 3 and gap["mean"] == pytest.approx(0.75) and gap["better"] == 1.0
    assert gap["interval"][0] >= 0.5
    same = evaluate(f"data.path={best}", f"report.compare={best}")["differences"]["sums"]
    assert same["mean"] == 0 and same["better"] == 0.5


@pytest.mark.parametrize("words", [["--compare", "other.parquet"], ["--compare=other.parquet"]])
def test_compare_is_an_option_too(here, words):
    best = write("best.parquet", [["1"], ["2"], ["3"]])
    write("other.parquet", GIVEN)
    settings = [f"data.path={best}", "custom_reward_function.path=scorer.py", "report.json=report.json"]
    assert main_eval.main([*settings, *words]) == 0
    assert json.loads(Path("report.json").read_text())["differences"]["sums"]["mean"] == pytest.approx(0.75)


def test_compare_without_a_file_is_refused(here, capsys):
    assert main_eval.main([f"data.path={write('out.parquet', GIVEN)}", "--compare"]) == 2
    assert "--compare: a file with the answers of another run is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "right", "wrong"),
    [
        ("openai/gsm8k", "#### 1", "#### {}"),
        ("lighteval/MATH", r"\boxed{1}", r"\boxed{{{}}}"),
        ("hiyouga/geometry3k", r"<think></think>\boxed{1}", r"<think></think>\boxed{{{}}}"),
        ("searchR1_nq", "<answer>1</answer>", "<answer>{}</answer>"),
        ("numina_cn_k12", r"\boxed{1}", r"\boxed{{{}}}"),
    ],
)
def test_the_majority_votes_with_every_scorer(here, source, right, wrong):
    """Of four answers two are right and the others differ: the majority of the four is right, the mean is a half."""
    answers = [[right, right, wrong.format(7), wrong.format(8)]] * 30
    name = write("out.parquet", answers, ["1"] * 30, source)
    assert main_eval.main([f"data.path={name}", "report.json=report.json", "report.samples=samples.parquet"]) == 0
    metrics = json.loads(Path("report.json").read_text())["data_sources"][source]["metrics"]
    variable = next(key.partition("/")[0] for key in metrics if "/maj@4/" in key)
    assert metrics[f"{variable}/maj@4/mean"] > metrics[f"{variable}/mean@4"] + 0.05
    assert {row["pred"] for row in pq.read_table("samples.parquet").to_pylist()} == {"1", "7", "8"}


def test_runs_without_a_common_prompt_cannot_be_compared(here, capsys):
    mine, other = write("a.parquet", [["1"]], ["1"]), "b.parquet"
    row = {"prompt": "another", "data_source": "sums", "reward_model": {"ground_truth": "1"}, "responses": ["1"]}
    write_prompts(other, [row])
    assert (
        main_eval.main([f"data.path={mine}", "custom_reward_function.path=scorer.py", f"report.compare={other}"]) == 2
    )
    assert "report.compare: the two files have no prompt in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        ([{"text": "a"}], [], "no column 'responses'"),
        ([{"responses": [], "reward_model": {"ground_truth": "1"}}], [], "out.parquet, row 0: no text in the column"),
        ([{"responses": [1], "reward_model": {"ground_truth": "1"}}], [], "out.parquet, row 0: no text in the column"),
        ([{"responses": ["1"], "reward_model": "1"}], [], "out.parquet, row 0: no fields in the column 'reward_model'"),
        ([{"responses": ["1"], "reward_model": {"ground_truth": "1"}}], ["custom_reward_function.path=null"],
         "no column 'data_source'"),
        ([{"responses": ["1"], "reward_model": {"ground_truth": "1"}, "data_source": "mine"}],
         ["custom_reward_function.path=null"], "no built-in scorer for this data_source"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_with_what_is_missing(here, capsys, rows, words, said):
    write_prompts("out.parquet", rows)
    assert main_eval.main(["data.path=out.parquet", "custom_reward_function.path=scorer.py", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.path=nothere.parquet", "data.path: no such file"),
        ("report.samples=a.csv", "report.samples: is written as parquet"),
        ("report.json=nofolder/a.json", "report.json: no such folder"),
        ("report.timeout=0", "report.timeout: out of range"),
        ("data.pth=a", "unknown setting"),
    ],
)
def test_a_wrong_setting_is_found_before_anything_is_scored(here, word, said):
    words = {"data.path": write("out.parquet", GIVEN)} | dict([word.split("=", 1)])
    with pytest.raises(ConfigError, match=said):
        load_config("evaluation", [f"{key}={value}" for key, value in words.items()])


def test_upstreams_other_spelling_and_its_ray_settings_are_taken(here):
    name = write("out.parquet", GIVEN)
    config = load_config("evaluation", [f"data.path={name}", "reward.custom_reward_function.path=scorer.py",
                                        "ray_kwargs.ray_init.num_cpus=4"])  # fmt: skip
    assert config.custom_reward_function.path == "scorer.py"
    assert "runs in this process" in notices()["ray_kwargs"]

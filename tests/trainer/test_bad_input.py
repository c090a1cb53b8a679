"""Whatever is wrong with a run, the command ends with one message that says what, where and what to change."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from tests.harness.configs import changed
from tests.harness.rows import addition_rows, write_prompts
from tests.harness.runs import COMMON, prepare
from tests.harness.scorers import scorer
from verl.metrics import notices
from verl.trainer import main_ppo, sft_trainer


@pytest.fixture
def run(workplace: Path, capsys: pytest.CaptureFixture[str]):
    """Runs `main_ppo` for one step with some settings changed; returns exit status and what was printed as an error."""
    prepare(scorer("0.5"))
    capsys.readouterr()
    small = ("data.train_batch_size=2", "data.max_response_length=4", "actor_rollout_ref.rollout.n=2",
             "actor_rollout_ref.actor.ppo_mini_batch_size=2")  # fmt: skip

    def go(*changes: str) -> tuple[int, str]:
        words = changed(COMMON, *small, *changes)
        return main_ppo.main([word for word in words if not word.endswith("=-")]), capsys.readouterr().err

    return go


def test_the_run_that_the_cases_below_spoil_is_a_good_one(run):
    status, error = run()
    assert (status, error) == (0, "")


def test_ctrl_c_before_training_is_one_sentence_and_its_status(run, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("verl.trainer.ppo.ray_trainer.RayPPOTrainer.init_workers", interrupted)
    said: list[str] = []
    monkeypatch.setattr("verl.trainer.command.tell", said.append)
    assert run() == (130, "")
    assert said == ["SIGINT: the program ends outside of a training step; what is saved is untouched"]


@pytest.mark.parametrize("changes, values", [((), 4), (("actor_rollout_ref.model.lora_rank=4",), 1)])
def test_a_model_that_memory_does_not_hold_is_refused_with_its_size(run, monkeypatch, changes, values):
    """Of each weight AdamW holds four values: itself, its gradient, two moments; of a frozen one there is one."""
    weights = sum(tensor.numel() for tensor in load_file("model/model.safetensors").values())
    monkeypatch.setattr("verl.engines.memory.free_host_memory", lambda: 4 * values * weights - 1)
    status, error = run(*changes)
    assert status == 2 and f"take {4 * values * weights / 1e9:.1f} GB of memory" in error and "Got 'model'" in error
    assert ("the optimizer's moments" in error) == (values == 4)
    monkeypatch.setattr("verl.engines.memory.free_host_memory", lambda: 4 * values * weights)
    assert run(*changes) == (0, "")


def test_few_rows_under_fully_async_name_the_settings_that_decide(run):
    status, error = run("trainer.v1.trainer_mode=fully_async", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    assert status == 2 and "fewer than one batch of" in error
    assert "Set async_training.require_batches x actor_rollout_ref.actor.ppo_mini_batch_size=" in error


def test_a_run_whose_every_update_was_not_finite_has_trained_nothing_and_says_so(run, monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("losses.py").write_text(
        "def spoiled(old_log_prob, log_prob, advantages, response_mask, **_):\n"
        "    return (log_prob * float('nan')).mean(), {}\n"
    )
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode=losses:spoiled"
    status, error = run(loss, "trainer.total_training_steps=2")
    assert status == 2
    assert "nothing was trained: all optimizer steps of the actor were skipped, 2 of them because" in error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("actor_rollout_ref.rollout.temperture=1", ["actor_rollout_ref.rollout.temperature", "temperture"]),
        ("trainer.total_training_steps=many", ["trainer.total_training_steps", "many"]),
        ("data.train_files=trian.parquet", ["data.train_files", "trian.parquet", "train.parquet"]),
        ("data.train_batch_size=3", ["ppo_mini_batch_size", "3"]),
        ("actor_rollout_ref.rollout.n=1", ["actor_rollout_ref.rollout.n", "algorithm.adv_estimator"]),
        ("actor_rollout_ref.model.path=./nowhere", ["actor_rollout_ref.model.path", "nowhere"]),
        ("algorithm.adv_estimator=gropo", ["algorithm.adv_estimator", "'grpo'"]),
        ("trainer.n_gpus_per_node=64", ["trainer.n_gpus_per_node", "64"]),
        ("trainer.logger=[console,swanlab]", ["trainer.logger", "swanlab"]),
        ("trainer.logger=[consol]", ["trainer.logger", "console"]),
        ("reward.custom_reward_function.path=nothere.py", ["reward.custom_reward_function.path", "nothere.py"]),
        (
            "actor_rollout_ref.rollout.name=vllm",
            ["actor_rollout_ref.rollout.name", "vLLM is not installed", "rollout.name=hf"],
        ),
        ("data.train_batch_size=16", ["8 rows"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_work(run, change, words):
    more = ["actor_rollout_ref.actor.ppo_mini_batch_size=16"] if change == "data.train_batch_size=16" else []
    status, error = run(change, *more)
    assert status == 2
    assert "Traceback" not in error
    for word in words:
        assert word in error


def test_a_folder_that_is_no_model_says_what_is_missing(run, tmp_path):
    (tmp_path / "folder").mkdir()
    status, error = run("actor_rollout_ref.model.path=./folder")
    assert status == 2
    assert "config.json" in error


def test_a_file_without_a_prompt_column_lists_its_columns(run, tmp_path):
    pq.write_table(pa.table({"promt": ["1+1="], "answer": ["2"]}), tmp_path / "bad.parquet")
    status, error = run("data.train_files=bad.parquet")
    assert status == 2
    for word in ("bad.parquet", "prompt", "promt", "answer"):
        assert word in error


def test_an_empty_file_is_named(run, tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    status, error = run("data.train_files=empty.parquet")
    assert status == 2
    assert "empty.parquet" in error


def test_a_prompt_that_is_too_long_is_named_with_its_length(run, tmp_path):
    rows = addition_rows(4)
    rows[2]["prompt"][0]["content"] = "x" * 90
    write_prompts(tmp_path / "long.parquet", rows)
    status, error = run("data.train_files=long.parquet")
    assert status == 2
    for word in ("long.parquet", "data.max_prompt_length", "data.truncation", "data.filter_overlong_prompts"):
        assert word in error


def test_an_unknown_data_source_names_both_ways_out(run):
    status, error = run("reward.custom_reward_function.path=-")
    assert status == 2
    for word in ("test/addition", "reward.custom_reward_function.path", "data_source"):
        assert word in error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ZeroDivisionError('a bug of mine')", ["ZeroDivisionError", "a bug of mine"]),
        ("return None", ["None"]),
        ("return float('nan')", ["nan"]),
        ("return 'good'", ["good"]),
        ("import time; time.sleep(60)", ["reward.timeout"]),
    ],
)
def test_a_reward_function_that_fails_everywhere_stops_the_run(run, tmp_path, body, words):
    code = f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n"
    (tmp_path / "bad.py").write_text(code)
    timeout = 0.5 if "sleep" in body else 60
    status, error = run("reward.custom_reward_function.path=bad.py", f"reward.timeout={timeout}")
    assert status == 2
    told = error + "".join(notices().values())
    for word in ("bad.py", "compute_score", *words):
        assert word in told


def test_a_reward_function_that_fails_on_some_rows_is_told_once_and_the_run_goes_on(run, tmp_path):
    code = (
        "count = 0\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    global count\n    count += 1\n    return 1 / (count % 2)\n"
    )
    (tmp_path / "half.py").write_text(code)
    status, _ = run("reward.custom_reward_function.path=half.py")
    assert status == 0
    told = "".join(notices().values())
    assert "ZeroDivisionError" in told
    assert "half.py" in told


def test_sft_names_a_misspelt_setting_too(capsys):
    assert sft_trainer.main(["data.trian_files=x"]) == 2
    assert "data.train_files" in capsys.readouterr().err


def test_a_second_run_in_a_folder_is_refused_and_leaves_the_configuration_of_the_first(run, tmp_path):
    from verl.checkpoint import RunLock

    folder = tmp_path / "busy"
    folder.mkdir()
    (folder / "config.yaml").write_text("of the first run")
    with RunLock(folder):
        status, said = run("trainer.default_local_dir=busy", "trainer.save_freq=1")
    assert status == 2 and "another run writes its checkpoints into this folder" in said
    assert (folder / "config.yaml").read_text() == "of the first run"

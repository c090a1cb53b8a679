"""Parts that pages print, of a run that is extended and of what surrounds one, run in this process on a small model."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.docs.printed import block
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from tests.harness.runs import records

EXTENDING, REWARDS, EVALUATION = "docs/howto/extending.md", "docs/howto/rewards.md", "docs/howto/evaluation.md"
FILES = {
    "my_estimators.py": "def half(",
    "my_losses.py": "import torch\nfrom verl.trainer.ppo.core_algos",
    "my_managers.py": "from dataclasses import replace",
    "my_datasets.py": "from verl.data import RLHFDataset",
    "my_loops.py": "from verl.agent_loop import AgentLoopBase",
    "my_trackers.py": "from verl.observability.tracker",
    "my_run.py": "import sys\n\nfrom verl.config import load_config",
}
USED = [
    "algorithm.adv_estimator=my_estimators:half",
    "actor_rollout_ref.actor.policy_loss.loss_mode=my_losses:plain_ratio",
    "reward.reward_manager.name=my_managers:ShortIsBetter",
    "data.custom_cls.path=my_datasets.py",
    "data.custom_cls.name=Swapped",
    "actor_rollout_ref.rollout.agent.default_agent_loop=my_loops:Hinted",
    "trainer.logger=[file,my_trackers:OneLine]",
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with data, and with the model where the quickstart leaves one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "logs"))
    write_prompts("train.parquet", 32)
    Path("my_reward.py").write_text(
        block(
            "docs/howto/rewards.md",
            'def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    """One',
        )
    )
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def arguments(page: str, start: str) -> tuple[str, list[str]]:
    """The module and the arguments of a printed command."""
    python, _, module, *words = shlex.split(block(page, start).replace("\\\n", " "))
    assert python == "python"
    return module, words


def run(page: str, start: str, *more: str) -> int:
    module, words = arguments(page, start)
    return importlib.import_module(module).main([*words, *more])


def test_every_extension_of_the_page_works_in_one_run(here, capsys, monkeypatch):
    tiny_model_dir("outputs/quickstart/sft/global_step_360/model/huggingface", hidden=16, layers=1, heads=2, kv_heads=1)
    for file, start in FILES.items():
        Path(file).write_text(block(EXTENDING, start))
    for used in USED:
        assert used in (Path(__file__).parents[2] / EXTENDING).read_text() or used.startswith("data.custom_cls")
    _, words = arguments(EXTENDING, "python -m verl.trainer.main_ppo")
    monkeypatch.setattr(sys, "argv", ["my_run.py", *words, *USED, "trainer.default_local_dir=run"])
    importlib.import_module("my_run")
    shown = capsys.readouterr().out
    assert "step 1: reward" in shown and "step 2: reward" in shown
    (file,) = Path("logs").rglob("*.jsonl")
    data = [record["data"] for record in records(file)]
    assert all("mine/reward" in row and "actor/ratio_max" in row for row in data)
    assert {abs(row["critic/advantages/min"]) for row in data} != {0.0}


@pytest.mark.parametrize(
    "form", ["def compute_score(data_source, solution_str, ground_truth, extra_info=None):", "def compute_reward"]
)
def test_both_forms_of_a_reward_function_pass_the_printed_check(here, capsys, form):
    Path("my_reward.py").write_text(block(REWARDS, form))
    assert run(REWARDS, "python -m verl.rewards.check") == 0
    shown = capsys.readouterr().out
    assert "1" in shown and "0" in shown and "calls failed" not in shown


def test_the_printed_penalty_for_long_answers_is_a_configuration(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        run(REWARDS, "python -m verl.trainer.main_ppo --cfg job")
    assert "overlong_buffer_cfg" in capsys.readouterr().out


def test_answers_are_scored_and_two_runs_compared_as_printed(here, capsys):
    rows = [
        {"prompt": f"{i}", "responses": ["#### 1", f"#### {i}"], "data_source": "openai/gsm8k"}
        | {"reward_model": {"ground_truth": f"{i}"}}
        for i in range(4)
    ]
    for name in ("answers", "after", "before"):
        write_prompts(f"{name}.parquet", rows)
    assert run(EVALUATION, "python -m verl.trainer.main_eval data.path=answers.parquet") == 0
    assert json.loads(Path("report.json").read_text())["test_score/openai/gsm8k"] == (4 + 1) / 8
    assert Path("report.md").read_text() in capsys.readouterr().out
    assert run(EVALUATION, "python -m verl.trainer.main_eval data.path=after.parquet --compare") == 0

"""What pages print is run as it stands there, and learns where they say so; sizes may shrink, nothing else is swapped.

`test_blocks` holds every block to a test or to a reason why there is none. That commands are made of settings that
exist is in `test_statements`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs.printed import WARMED_UP, bash, block, rewards
from tests.docs.test_statements import blocks
from tests.sanity.source_tree import ROOT
from verl.data.filtering import filter_of

RUN = {
    "README.md": (
        "import pandas",
        "def compute_score",
        "python make_data.py",
        "import verl\n",
        "examples/smollm2/run.py addition",  # tests/e2e/test_published_model.py
        "def half(",  # tests/recipe/test_own_code.py
    ),
    "docs/howto/data.md": ("import pandas", "data_preprocess/arithmetic.py", "def keep_prompt"),
    "docs/howto/environments.md": ("# game.py", "prompts.jsonl"),  # tests/e2e/test_environment.py
    "docs/howto/evaluation.md": ("report.markdown", "--compare"),  # test_printed_parts, as the next one
    "docs/howto/extending.md": (
        *("python -m verl.trainer.main_ppo", "def half(", "agg_loss", "RewardManager", "RLHFDataset"),
        *("AgentLoopBase", "import Tracker", "TaskRunner"),
        *("LossFacts", "ConfigNode"),  # tests/recipe/test_own_code.py
    ),
    "docs/howto/placement.md": ("--cfg job",),  # tests/config/test_topology.py
    "docs/howto/rewards.md": (
        *("def compute_score", "def compute_reward", "python -m verl.rewards.check"),
        "reward.reward_manager.name=dapo",
        "import functools",  # tests/rewards/judges/test_verdicts.py
    ),
    "docs/howto/sft.md": ("python -m verl.trainer.sft_trainer",),
    "docs/start/python.md": ("import verl\n",),
    "docs/start/quickstart.md": ("adv_estimator=grpo", "adv_estimator=gae"),
}
"""Page -> what stands in the blocks that a test runs: one below, unless another file is named."""


def rises(values: list[float], start: int, end: int) -> bool:
    """From below 0.4 in the first steps to above 0.45, and by more than 0.15, in the last ones."""
    first, last = sum(values[:start]) / start, sum(values[-end:]) / end
    return first < 0.4 and last > 0.45 and last - first > 0.15


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The quickstart by hand, to its end: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("by_hand")
    return folder, bash(folder, block("docs/start/quickstart.md", "python examples/data_preprocess/arithmetic.py"))


@pytest.mark.slow
def test_the_quickstart_by_hand_learns_from_reward(by_hand):
    _, printed = by_hand
    values = rewards(printed)
    assert len(values) == 15 and rises(values, 2, 5), values


@pytest.mark.slow
def test_its_variation_with_a_critic_learns_from_reward(by_hand):
    folder, _ = by_hand
    (ppo,) = [one for one in blocks(ROOT / "docs/start/quickstart.md", "bash") if "adv_estimator=gae" in one]
    values = rewards(bash(folder, ppo))
    assert len(values) == 20 and rises(values, 2, 5), values


@pytest.mark.slow
def test_the_page_of_fine_tuning_goes_on_from_it(by_hand):
    folder, _ = by_hand
    sft = block("docs/howto/sft.md", "python -m verl.trainer.sft_trainer")
    bash(folder, sft, total_training_steps="2", save_freq="2")
    assert (folder / "my/sft2/global_step_2/model/huggingface/model.safetensors").is_file()


def labels(text: str) -> dict[str, list[str]]:
    """The rows of a step's table: its name, and what stands before each number."""
    rows = re.findall(r"^│ (\w+) +│ (.*?) *│$", text, re.MULTILINE)
    return {name: [word for word in re.split(r" *-?\d[\d.e+-]* *", values) if word] for name, values in rows}


@pytest.mark.slow
def test_the_readme_goes_from_data_to_a_checkpoint_and_shows_what_a_step_prints(by_hand, tmp_path):
    made, _ = by_hand
    shutil.copytree(made / "my/sft/global_step_60/model/huggingface", tmp_path / WARMED_UP)
    (tmp_path / "make_data.py").write_text(block("README.md", "import pandas"))
    (tmp_path / "my_reward.py").write_text(block("README.md", "def compute_score"))
    activate = "source .venv/bin/activate\n"
    script = block("README.md", activate).removeprefix(activate)  # the tests run in it
    both = script.replace("trainer.save_freq=10", "trainer.save_freq=10 trainer.console=both")
    printed = bash(tmp_path, both, total_training_steps="1", save_freq="1")
    assert (tmp_path / "checkpoints/sums/first/global_step_1/actor/huggingface/model.safetensors").is_file()
    (sample,) = [one for one in blocks(ROOT / "README.md", "text") if "sampled completions" in one]
    shown, now = labels(sample), labels(printed)
    assert set(shown) == {"reward", "actor"} and {name: now[name] for name in shown} == shown
    assert "sampled completions · step 1" in printed and "step 1/1 · epoch 0" in printed


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/start/python.md"])
def test_the_ten_lines_from_python_train_and_save(by_hand, tmp_path, page):
    """Of their hundred steps the first two: only the number of rows is smaller."""
    made, _ = by_hand
    shutil.copytree(made / "my/sft/global_step_60/model/huggingface", tmp_path / WARMED_UP)
    script = block(page, "import verl\n").replace("range(10, 50)", "range(10, 16)", 1).replace("(10, 50)", "(10, 15)")
    assert len([line for line in script.splitlines() if line]) <= 10
    (tmp_path / "ten_lines.py").write_text(script)
    printed = bash(tmp_path, "python ten_lines.py")
    (saved,) = tmp_path.glob("runs/grpo-*/global_step_2/actor/huggingface")
    assert (saved / "model.safetensors").is_file() and str(saved.relative_to(tmp_path)) in printed


def test_the_page_of_data_writes_what_it_says(tmp_path):
    script = block("docs/howto/data.md", "import pandas")
    (tmp_path / "columns.py").write_text(script)
    bash(tmp_path, f"python columns.py\n{block('docs/howto/data.md', 'python examples/data_preprocess/arithmetic.py')}")
    written = ["train.parquet", *(f"data/arithmetic/{name}.parquet" for name in ("train", "test", "sft"))]
    assert [name for name in written if not (tmp_path / name).is_file()] == []


def test_the_filter_of_the_page_of_data_keeps_hard_prompts_and_drops_easy_ones(tmp_path):
    (tmp_path / "my_filter.py").write_text(block("docs/howto/data.md", "def keep_prompt"))
    keep = filter_of({"filter_function": {"path": str(tmp_path / "my_filter.py"), "name": "keep_prompt"}})
    assert keep is not None
    kept = [keep({"extra_info": {"difficulty": number}}, lambda: "here") for number in (1, 2, 3)]
    assert kept == [False, False, True]

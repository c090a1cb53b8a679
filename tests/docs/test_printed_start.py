"""The first pages are run as they stand: a task of one's own, commands of upstream, TRL's task, the short command."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.printed import WARMED_UP, bash, block, rewards
from tests.docs.test_statements import blocks
from tests.sanity.source_tree import ROOT

OWN, TRL, VERL = "docs/start/own_task.md", "docs/start/from_trl.md", "docs/start/from_verl.md"
INSTALL, QUICKSTART, COMMAND = "docs/start/install.md", "docs/start/quickstart.md", "docs/start/command.md"
MODEL = "my/sft/global_step_60/model/huggingface"
RUN: dict[str, tuple[str, ...]] = {
    OWN: (
        "import json\n",
        "def compute_score(",
        "python my/rows.py",
        "verl train grpo",
        "tail -n 3 ",
        "verl resume",
        "import verl\n",
    ),
    TRL: ("import verl\n", "def wrapped("),
    VERL: ("python3 -m verl.trainer.main_ppo",),
    INSTALL: ("verl doctor",),
    COMMAND: ("verl train grpo --preset quickstart --dry-run",),
}
NOT_RUN: dict[str, dict[str, str]] = {
    INSTALL: {
        "make install": "a package index",
        "pip install": "a package index",
        "uv lock": "uv and a package index",
        "docker build": "docker",
    },
    QUICKSTART: {"make quickstart": "a package index"},
    TRL: {"from datasets import": "TRL, which is in an environment of its own"},
}
DOOR = ROOT / "benchmarks" / "door"


@pytest.fixture
def here(fine_tuned: Path, tmp_path: Path) -> Path:
    """A folder of a test with what the quickstart leaves."""
    shutil.copytree(fine_tuned / "my", tmp_path / "my")
    return tmp_path


@pytest.fixture(scope="module")
def digits(fine_tuned: Path) -> tuple[Path, str, str]:
    """The task of the page up to its trained model: the folder, and what the check and the run printed."""
    for name, start in (("rows.py", "import json\n"), ("digits.py", "def compute_score(")):
        (fine_tuned / "my" / name).write_text(block(OWN, start))
    checked = bash(fine_tuned, block(OWN, "python my/rows.py"))
    return fine_tuned, checked, bash(fine_tuned, block(OWN, "verl train grpo"))


@pytest.mark.parametrize(
    ("page", "start"), [(page, start) for kind in (RUN, NOT_RUN) for page in kind for start in kind[page]]
)
def test_a_block_of_the_tables_is_on_its_page_once(page, start):
    assert block(page, start)


@pytest.mark.parametrize("page", sorted({*RUN, *NOT_RUN} - {QUICKSTART}))
def test_every_block_of_these_pages_is_in_one_of_the_tables(page):
    named = (*RUN.get(page, ()), *NOT_RUN.get(page, {}))
    assert [one for one in blocks(ROOT / page, "bash", "python") if not one.startswith(named)] == []


@pytest.mark.slow
def test_the_own_task_checks_its_reward_and_learns(digits):
    folder, checked, printed = digits
    assert "my/digits_train.jsonl: 80 rows" in checked and "form 'single'" in checked
    values = rewards(printed)
    assert len(values) == 60
    assert values[0] < 0.25 and sum(values[-20:]) / 20 > 0.5, values
    accuracies = [float(one) for one in re.findall(r"val-core/\w+/acc/mean@1:([\d.e-]+)", printed)]
    assert len(accuracies) == 4 and accuracies[0] < 0.3 and accuracies[-1] > 0.4, accuracies
    assert (folder / "my/digits/global_step_60/actor/huggingface/model.safetensors").is_file()


@pytest.mark.slow
def test_the_own_task_shows_samples_and_a_curve_and_goes_on(digits):
    folder, _, _ = digits
    shown = bash(folder, block(OWN, "tail -n 3 "))
    samples = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
    assert len(samples) == 3 and all({"input", "output", "gts", "score"} <= set(one) for one in samples)
    assert list(folder.rglob("*.png")), shown
    printed = bash(folder, block(OWN, "verl resume"), total_training_steps="62")
    assert len(rewards(printed)) == 2 and (folder / "my/digits/global_step_62/actor").is_dir()


@pytest.mark.slow
def test_the_own_task_runs_from_python(digits, here):
    shutil.copy(digits[0] / "my/digits.py", here / "my/digits.py")
    script = block(OWN, "import verl\n").replace('"total_epochs": 8', '"total_training_steps": 2')
    assert "total_training_steps" in script
    (here / "own.py").write_text(script)
    printed = bash(here, "python own.py")
    (saved,) = here.glob("runs/grpo-*/global_step_2/actor/huggingface")
    (curve,) = here.glob("runs/grpo-*/curve.png")
    assert (saved / "model.safetensors").is_file() and str(curve.relative_to(here)) in printed


@pytest.mark.slow
def test_a_command_of_upstream_runs_with_a_notice_for_each_old_key(here):
    printed = bash(here, "exec 2>&1\n" + block(VERL, "python3 -m"))
    (said,) = blocks(ROOT / VERL, "text")
    assert [line for line in said.splitlines() if line not in printed] == []
    assert len(rewards(printed)) == 2


@pytest.mark.slow
def test_the_short_command_looks_at_a_run_without_starting_it(here):
    assert "the run can start" in bash(here, block(COMMAND, "verl train grpo"))
    assert not (here / "runs").exists()


def test_the_page_of_installing_shows_the_versions(tmp_path):
    assert "torch" in bash(tmp_path, block(INSTALL, "verl doctor"))


def body(script: Path) -> str:
    """A script without its docstring."""
    return script.read_text().split('"""\n\n', 1)[1]


def lines(script: Path) -> int:
    return sum(bool(line.strip()) for line in body(script).splitlines())


def test_the_page_of_trl_prints_the_two_scripts_that_are_compared():
    theirs, ours = DOOR / "grpo_trl.py", DOOR / "grpo_verl.py"
    assert block(TRL, "from datasets import") == body(theirs) and block(TRL, "import verl\n") == body(ours)
    assert lines(ours) <= 10 and lines(ours) < lines(theirs)


def function(source: str, name: str) -> Callable[..., Any]:
    """A function of a text, without running the rest of it."""
    (found,) = [one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name == name]
    space: dict[str, Any] = {}
    exec(compile(ast.Module([found], []), name, "exec"), space)
    return space[name]


def test_a_reward_of_trl_is_wrapped_as_the_page_says(tmp_path):
    from verl.rewards.forms import Form, read_form

    wrapped = function(block(TRL, "def wrapped("), "wrapped")
    wrapped.__globals__["right"] = function(block(TRL, "from datasets import"), "right")
    assert read_form(wrapped).form is Form.RESPONSES
    assert wrapped(["42", "42="], ["42", "42"]) == [1.0, 0.0]


@pytest.mark.slow
def test_the_task_of_trl_trains_and_saves(fine_tuned, tmp_path):
    shutil.copytree(fine_tuned / MODEL, tmp_path / WARMED_UP)
    script = block(TRL, "import verl\n").replace("range(10, 50)", "range(10, 16)", 1).replace("(10, 50)", "(10, 15)")
    (tmp_path / "ours.py").write_text(script)
    assert len(rewards(bash(tmp_path, "python ours.py"))) == 2
    assert len(list(tmp_path.glob("runs/grpo-*/global_step_2/actor/huggingface/model.safetensors"))) == 1


def test_the_comparison_reads_rewards_off_the_lines_of_both(monkeypatch):
    monkeypatch.syspath_prepend(DOOR)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds a folder of its own
    import compare

    line = "step:1 - critic/score/mean:0.25 - critic/score/max:1.0"
    log = "{'loss': '0.01', 'rewards/right/mean': '0.5', 'reward': '0.5', 'reward_std': '0.1'}"
    assert [one[0] or one[1] for text in (line, log) for one in compare.REWARD.findall(text)] == ["0.25", "0.5"]
    assert compare.lines_of(DOOR / "grpo_verl.py") == lines(DOOR / "grpo_verl.py")

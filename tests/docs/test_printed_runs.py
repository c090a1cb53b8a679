"""What the pages of checkpoints, of watching a run and of its troubles print is run as it stands there."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.printed import bash, block
from tests.docs.test_statements import METRIC, blocks, code
from tests.docs.test_troubleshooting import is_shown
from tests.harness.programs import run
from tests.sanity.source_tree import ROOT

CHECKPOINTS, TRACKING = "docs/howto/checkpoints.md", "docs/howto/tracking.md"
TROUBLES, FALLS = "docs/howto/troubleshooting.md", "docs/howto/reward_falls.md"
RUN: dict[str, tuple[str, ...]] = {
    CHECKPOINTS: ("verl train grpo", "verl resume", "from transformers", "CheckpointCallback", "model_merger merge"),
    TRACKING: ("verl train grpo", "ledger_reader", "gantt", "rollout_trace_op"),
    TROUBLES: ("verl doctor",),
    FALLS: ("verl plots",),
}
NOT_RUN: dict[str, dict[str, str]] = {
    "docs/howto/viewer.md": {"verl view": "it serves until Ctrl-C; tests/viewer/test_program.py starts it"}
}
WARMED_UP = "my/sft/global_step_60/model/huggingface"
ELSEWHERE = ("training/off_policy/", "training/rollout_probs_diff", "actor/kl_loss", "actor/loss_scale", "critic/vf_")
"""Metrics that runs of other settings log."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of the quickstart, and its base model where the fine-tuned one would be."""
    folder = tmp_path_factory.mktemp("made")
    lines = block("docs/start/quickstart.md", "python examples/data_preprocess/arithmetic.py").splitlines()
    bash(folder, "\n".join(line for line in lines if line.startswith("python examples/")))
    shutil.copytree(folder / "my/base", folder / WARMED_UP)
    return folder


@pytest.fixture(scope="module")
def saved(made: Path) -> Path:
    """The run of the page of checkpoints, to its end."""
    bash(made, block(CHECKPOINTS, "verl train grpo"))
    return made


@pytest.fixture(scope="module")
def watched(made: Path) -> tuple[Path, str]:
    """The run of the page of watching, to its end, and what it printed."""
    return made, bash(made, block(TRACKING, "verl train grpo"))


def names_in_tree(page: str) -> set[str]:
    """The names of files and folders in the picture of a run's folder."""
    (tree,) = [one for one in blocks(ROOT / page, "text") if "├── " in one]
    cells = re.findall(r"[├└]── (.*?)(?:  |$)", tree, re.MULTILINE)
    return {name.rstrip("/") for cell in cells for name in cell.split(", ")}


@pytest.mark.slow
def test_the_page_of_checkpoints_shows_the_folder_that_a_run_leaves(saved):
    there = {path.name for path in (saved / "my/saved").rglob("*")}
    shown = names_in_tree(CHECKPOINTS)
    assert len(shown) > 8 and shown <= there, shown - there
    assert {"global_step_5", "global_step_10"} <= there


@pytest.mark.slow
def test_a_checkpoint_is_loaded_and_merged_as_printed(saved):
    loads = block(CHECKPOINTS, "from transformers")
    (saved / "loads.py").write_text(loads)
    assert run([sys.executable, "loads.py"], cwd=saved).stdout.endswith("\n")
    assert "wrote my/merged" in bash(saved, block(CHECKPOINTS, "python -m verl.model_merger"))
    weights = [(saved / place / "model.safetensors").stat().st_size for place in ("my/merged", WARMED_UP)]
    assert min(weights) > 1_000_000


@pytest.mark.slow
def test_a_changed_setting_is_refused_as_the_page_shows(saved, tmp_path):
    shutil.copytree(saved / "my", tmp_path / "my")
    (shown,) = [one for one in blocks(ROOT / CHECKPOINTS, "text") if "resume_changed" in one]
    changed = block(CHECKPOINTS, "verl resume").strip() + " actor_rollout_ref.actor.optim.lr=1e-2"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = run(["bash", "-ec", changed], cwd=tmp_path, check=False, COLUMNS="120")
    said = done.stderr[done.stderr.index("error: ") :].strip()
    assert done.returncode == 2 and is_shown(shown.strip(), said), said


@pytest.mark.slow
def test_a_run_is_resumed_and_each_checkpoint_is_told_to_the_printed_class(saved, tmp_path):
    shutil.copytree(saved / "my", tmp_path / "my")
    (tmp_path / "register.py").write_text(block(CHECKPOINTS, "from verl.trainer.ppo.callbacks"))
    named = "trainer.checkpoint_callback_class=register:Register"
    assert named in (ROOT / CHECKPOINTS).read_text(encoding="utf-8")
    printed = bash(tmp_path, f"{block(CHECKPOINTS, 'verl resume').strip()} {named}")
    steps = [int(step) for step in re.findall(r"^step:(\d+) - ", printed, re.MULTILINE)]
    assert steps == [11, 12] and re.search(r"^step 12 is in \S+/my/saved/global_step_12$", printed, re.MULTILINE)


@pytest.mark.slow
def test_the_page_of_watching_leaves_metrics_curves_and_samples(watched):
    folder, printed = watched
    lines = [json.loads(line) for line in (folder / "my/watched/metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} >= set(range(1, 11)) and "my/watched/metrics.png" in printed
    assert (folder / "my/watched/metrics.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard_log/runs/watched").glob("events.*"))
    samples = (folder / "my/watched/samples/10.jsonl").read_text().splitlines()
    assert len(samples) == 16 * 8 and {"input", "output", "gts", "score"} <= set(json.loads(samples[0]))


@pytest.mark.slow
def test_the_ledger_and_the_chart_are_read_as_printed(watched):
    folder, _ = watched
    account, step = bash(folder, block(TRACKING, "python -m verl.journal.ledger_reader")).split("last complete")
    assert (
        re.search(r"^trained on +1280\b", account, re.MULTILINE)
        and step.count("trained in step 2,") == 40
        and "88 more" in step
    )
    table = bash(folder, block(TRACKING, "python -m verl.journal.gantt"))
    assert "idle" in table and (folder / "my/watched/gantt.svg").read_text().startswith("<svg")


def test_the_printed_mark_of_a_function_leaves_its_result_as_it_is():
    names: dict[str, Any] = {}
    exec(block(TRACKING, "from verl.utils.rollout_trace"), names)
    assert asyncio.run(names["Search"]().look_up("verl")) == "no page about verl"


@pytest.mark.slow
def test_the_three_looks_of_troubleshooting_show_versions_data_and_scores(made):
    printed = bash(made, block(TROUBLES, "verl doctor"))
    assert all(word in printed for word in ("torch", "my/data/train.parquet: 80 rows", "reward function compute_score"))


@pytest.mark.slow
def test_the_three_looks_at_a_reward_show_curves_scores_and_samples(watched):
    folder, _ = watched
    printed = bash(folder, block(FALLS, "verl plots"))
    assert "my/watched/metrics.png" in printed and "reward function compute_score" in printed
    assert len([line for line in printed.splitlines() if line.startswith("{") and '"score"' in line]) == 4


@pytest.mark.slow
def test_the_metrics_that_the_page_of_falling_rewards_names_are_logged(watched):
    folder, _ = watched
    lines = (folder / "my/watched/metrics.jsonl").read_text().splitlines()
    logged = {key for line in lines for key in json.loads(line)["data"]}
    named = {text for text in code(ROOT / FALLS) if METRIC.fullmatch(text) and not text.startswith(ELSEWHERE)}
    assert len(named) > 12 and named <= logged, named - logged

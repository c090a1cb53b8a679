"""What the pages of samplers, algorithms and their corrections print is run, on the model that the quickstart makes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.docs.printed import bash, block
from tests.docs.test_statements import blocks
from tests.sanity.source_tree import ROOT
from verl.config.loading.configuration import read_config

ENGINES, DYNAMIC, TEACHERS = (f"docs/howto/{name}.md" for name in ("engines", "dynamic_sampling", "distillation"))
SAMPLING, ALGORITHMS = "docs/concepts/sampling.md", "docs/concepts/algorithms.md"
CORRECTION, SPEED = "docs/advance/rollout_is_migration.md", "docs/howto/perf_tuning.md"
RUN: dict[str, tuple[str, ...]] = {
    ENGINES: ("export VERL_SERVER_KEY", "verl generate"),
    DYNAMIC: ("verl train dapo",),
    TEACHERS: ("verl train grpo", "python -c", "verl sft"),
    SAMPLING: ("import asyncio", "verl train grpo"),
    ALGORITHMS: ("verl train rloo",),
    CORRECTION: ("bash examples/rollout_importance_sampling/run_with_rollout_is.sh",),
}
"""Page -> the starts of the blocks that a test of this file runs."""
NOT_RUN: dict[str, dict[str, str]] = {
    ENGINES: {"make test-vllm": "an environment with vLLM (4 GB)", "VLLM_SERVER_DEV_MODE=1": "vLLM's server"},
}
"""Page -> the starts of the blocks that none runs, and what they need."""
TRAINING = re.compile(r"^(?:python -m verl\.trainer\.main_ppo|verl train)\b", re.MULTILINE)


def trained(folder: Path, page: str, start: str, steps: int) -> tuple[list[dict[str, float]], dict[str, str]]:
    """The metrics of the first steps of a printed run, and its settings as ``key=value`` lines."""
    script = f"trap 'kill $(jobs -p) || true' EXIT\n{block(page, start)}"  # a run that fails leaves no host behind
    before = {*folder.glob("runs/*")}
    bash(folder, script, total_training_steps=str(steps))
    (run,) = {*folder.glob("runs/*")} - before
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [record["data"] for record in records if "critic/score/mean" in record["data"]]
    assert len(rows) == steps
    return rows, (run / "config.yaml").read_text()


@pytest.mark.slow
def test_the_page_of_sampling_draws_four_tokens(fine_tuned):
    (fine_tuned / "draw.py").write_text(block(SAMPLING, "import asyncio"))
    printed = bash(fine_tuned, "python draw.py")
    tokens = re.search(r"token_ids=\(([\d, ]+)\)", printed)
    assert tokens is not None and 1 <= len(re.findall(r"\d+", tokens[1])) <= 4


@pytest.mark.slow
def test_the_printed_partial_rollouts_leave_responses_to_the_next_step(fine_tuned):
    rows, _ = trained(fine_tuned, SAMPLING, "verl train grpo", steps=2)
    assert rows[0]["rollout/partial/left"] == rows[1]["rollout/partial/resumed"]
    assert {"rollout/partial/waiting", "rollout/partial/versions/max"} <= {*rows[1]}


@pytest.mark.slow
def test_the_page_of_algorithms_combines_rloo_with_cispo(fine_tuned):
    rows, settings = trained(fine_tuned, ALGORITHMS, "verl train rloo", steps=2)
    assert "adv_estimator: rloo" in settings and "loss_mode: cispo" in settings
    assert all({"actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac"} <= {*row} for row in rows)


@pytest.mark.slow
def test_the_printed_dynamic_sampling_fills_the_batch_with_groups_that_differ(fine_tuned):
    rows, _ = trained(fine_tuned, DYNAMIC, "verl train dapo", steps=2)
    assert all(row["training/zero_advantage_groups"] == 0 for row in rows)
    assert sum(row["training/filter_groups/dropped_groups"] for row in rows) > 0
    assert {"training/zero_variance_groups", "training/num_gen_batches"} <= {*rows[0]}
    assert "training/filter_groups/carried_samples" in rows[0]


@pytest.mark.slow
def test_the_printed_distillation_moves_a_new_model_towards_its_teacher(fine_tuned):
    rows, _ = trained(fine_tuned, TEACHERS, "verl train grpo", steps=20)
    first, last = (sum(row["distillation/loss"] for row in part) for part in (rows[:3], rows[-3:]))
    assert last < 0.8 * first and "actor/pg_loss" not in rows[0]


@pytest.mark.slow
def test_the_printed_teachers_share_the_rows_by_a_column(fine_tuned):
    rows, _ = trained(fine_tuned, TEACHERS, "python -c", steps=2)
    for row in rows:
        assert row["distillation/rows/teacher_a"] > 0 and row["distillation/rows/teacher_b"] > 0


@pytest.mark.slow
def test_the_printed_fine_tuning_with_a_teacher_lowers_the_divergence(fine_tuned):
    printed = bash(fine_tuned, block(TEACHERS, "verl sft"))
    values = [float(value) for value in re.findall(r"distillation/loss:([\d.e-]+)", printed)]
    assert len(values) == 20 and values[-1] < 0.5 * values[0]


@pytest.mark.slow
def test_the_page_of_engines_trains_against_a_host(fine_tuned):
    rows, settings = trained(fine_tuned, ENGINES, "export VERL_SERVER_KEY", steps=2)
    assert "name: server" in settings and "VERL_SERVER_KEY" in settings
    assert all(row["perf/weights_sent_mb"] > 1 for row in rows), "the host gets the weights of each step"
    assert any(row["critic/score/mean"] > 0 for row in rows)


@pytest.mark.slow
def test_the_page_of_engines_answers_each_prompt_five_times(fine_tuned):
    bash(fine_tuned, block(ENGINES, "verl generate"))
    prompts = pq.read_table(fine_tuned / "my/data/test.parquet")
    answers = pq.read_table(fine_tuned / "my/answers.parquet")
    assert answers.column_names == [*prompts.column_names, "responses"] and len(answers) == len(prompts)
    assert {len(texts) for texts in answers["responses"].to_pylist()} == {5}


@pytest.mark.slow
def test_the_page_of_the_correction_prints_metrics_and_their_ranges(tmp_path):
    printed = bash(tmp_path, f"export TINY=1\n{block(CORRECTION, 'bash examples/rollout_importance')}")
    for name, healthy in re.findall(
        r"^\| `((?:rollout_is|mismatch)_\w+)` .*\| (\w+ [\d.]+) \|$", text(CORRECTION), re.M
    ):
        assert re.search(rf"{name} .*{healthy}", printed), name


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


SETTINGS = [(page, one) for page in (DYNAMIC, CORRECTION, SPEED) for one in blocks(ROOT / page, "ini")]


@pytest.mark.parametrize(("page", "lines"), SETTINGS)
def test_printed_settings_can_be_set(page, lines):
    words = [line for line in lines.splitlines() if not line.startswith("#")]
    read_config("ppo_trainer", words)


def test_every_block_of_these_pages_is_run_or_said_not_to_be():
    for page in (ENGINES, DYNAMIC, SAMPLING, ALGORITHMS, CORRECTION, SPEED):
        known = (*RUN.get(page, ()), *NOT_RUN.get(page, {}))
        starts = [[start for start in known if one.startswith(start)] for one in blocks(ROOT / page, "bash", "python")]
        assert sorted(one for (one,) in starts) == sorted(known), page

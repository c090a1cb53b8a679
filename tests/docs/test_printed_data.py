"""What the pages of data, rewards, supervised runs, evaluation and adapters print is run as it stands there."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from tests.docs.printed import bash, block
from tests.docs.test_statements import blocks
from tests.sanity.source_tree import ROOT
from verl.data.vision.images import ImageLimits, load_image

DATA, VISION, REWARDS = "docs/howto/data.md", "docs/howto/vision.md", "docs/howto/rewards.md"
GSM8K, SFT, PREFERENCE = "docs/howto/gsm8k.md", "docs/howto/sft.md", "docs/howto/preference.md"
EVALUATION, LORA = "docs/howto/evaluation.md", "docs/howto/lora.md"
RUN: dict[str, tuple[str, ...]] = {
    DATA: ("verl data train.parquet",),
    VISION: ("python examples/vision/make_model.py", "import io"),
    REWARDS: ("verl train ppo",),
    GSM8K: ("python -m verl.rewards.check",),
    SFT: ("torchrun",),
    PREFERENCE: ("import pandas", "verl dpo"),
    EVALUATION: ("verl generate", "python -m lm_eval"),
    LORA: ("verl train grpo", "python -m verl.model_merger"),
}
"""Blocks that a test here runs: how they begin."""
NOT_RUN: dict[str, dict[str, str]] = {
    GSM8K: {
        "python examples/data_preprocess/gsm8k.py": "the hub; the test here runs it on local files",
        "verl train grpo --preset gsm8k-0.5b": "a GPU",
        "verl train ppo --preset gsm8k-0.5b": "a GPU",
    },
}
"""Blocks that no test runs, and why."""


def series(printed: str, name: str) -> list[float]:
    """The values of a metric, step by step."""
    return [float(value) for value in re.findall(rf" {re.escape(name)}:(-?[\d.e+-]+)", printed)]


@pytest.fixture(scope="module")
def pairs(fine_tuned: Path) -> tuple[Path, str]:
    """The folder with both models that the page of pairs trains, and what this printed."""
    (fine_tuned / "pairs.py").write_text(block(PREFERENCE, "import pandas"))
    return fine_tuned, bash(fine_tuned, f"python pairs.py\n{block(PREFERENCE, 'verl dpo')}")


def test_the_page_of_data_shows_a_file_and_what_reads_it(tmp_path):
    (tmp_path / "columns.py").write_text(block(DATA, "import pandas"))
    printed = bash(tmp_path, f"python columns.py\n{block(DATA, 'verl data')}")
    assert "train.parquet: 1600 rows" in printed and "ground_truth" in printed
    assert "read by: verl train, verl generate" in printed


def test_the_row_with_an_image_on_its_page_can_be_read(tmp_path):
    (tmp_path / "row.py").write_text(block(VISION, "import io"))
    bash(tmp_path, "python row.py")
    (row,) = pd.read_parquet(tmp_path / "pictures.parquet").to_dict("records")
    assert load_image(row["images"][0], "row 0", ImageLimits()).getpixel((0, 0)) == (255, 0, 0)
    assert row["prompt"][0]["content"].count("<image>") == len(row["images"])


@pytest.mark.slow
def test_the_page_of_images_learns_a_task_from_reward(tmp_path):
    printed = bash(tmp_path, block(VISION, "python examples/vision/make_model.py"))
    values = series(printed, "critic/score/mean")
    assert len(values) == 80 and sum(values[:3]) / 3 < 0.6 and sum(values[-5:]) / 5 > 0.9, values


def test_gsm8k_is_written_and_its_scorer_checked_as_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for split in ("train", "test"):
        rows = [{"question": f"What is {i} plus 40?", "answer": f"Add them.\n#### {i + 40}"} for i in range(3)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write = block(GSM8K, "python examples/data_preprocess/gsm8k.py").strip()
    bash(tmp_path, f"{write} --local_dataset_path {tmp_path}")
    assert len(pd.read_parquet(tmp_path / "data/gsm8k/train.parquet")) == 3
    scores = re.findall(
        r"openai/gsm8k +│ +40 +│ (.*?) +│ +(\d) │", bash(tmp_path, block(GSM8K, "python -m verl.rewards.check"))
    )
    assert dict(scores)["#### 40"] == "1" and dict(scores)["this is not the answer"] == "0"


@pytest.mark.slow
def test_pairs_train_a_policy_and_a_reward_model_as_printed(pairs):
    folder, printed = pairs
    for name in ("train/rewards/accuracies", "train/accuracy"):
        values = series(printed, name)
        assert len(values) == 20 and values[0] < 0.7 and sum(values[-5:]) / 5 > 0.95, (name, values)
    for run in ("dpo", "rm"):
        assert (folder / f"my/{run}/global_step_20/model/huggingface/model.safetensors").is_file()


@pytest.mark.slow
def test_ppo_takes_its_reward_from_the_reward_model_of_the_pairs(pairs):
    folder, _ = pairs
    printed = bash(folder, block(REWARDS, "verl train ppo"), total_training_steps="2")
    scores, rewards = series(printed, "reward_model/score/mean"), series(printed, "critic/score/mean")
    assert len(scores) == 2 and scores == pytest.approx(rewards, rel=1e-3)


@pytest.mark.slow
def test_fine_tuning_on_two_processes_leaves_a_model(fine_tuned):
    bash(fine_tuned, block(SFT, "torchrun"), total_training_steps="2", save_freq="2")
    saved = fine_tuned / "my/sft_on_two/global_step_2/model/huggingface"
    assert len(list(saved.glob("model-*-of-00002.safetensors"))) == 2, "one file of each process"


@pytest.mark.slow
def test_answers_are_generated_and_scored_as_printed(fine_tuned):
    printed = bash(fine_tuned, block(EVALUATION, "verl generate"))
    answers = pd.read_parquet(fine_tuned / "my/answers.parquet")
    assert {len(row) for row in answers["responses"]} == {4}
    assert "arithmetic" in printed and "pass@4" in printed


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install lm-eval")
def test_lm_eval_scores_greedy_answers_as_the_library_does(fine_tuned, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (task,) = [one for one in blocks(ROOT / EVALUATION, "yaml") if "tasks/sums.yaml" in one]
    (fine_tuned / "tasks").mkdir()
    (fine_tuned / "tasks/sums.yaml").write_text(task)
    printed = bash(fine_tuned, block(EVALUATION, "python -m lm_eval"))
    (theirs,) = re.findall(r"\|exact_match\|↑  \| *([\d.]+)\|", printed)
    greedy = block(EVALUATION, "verl generate").replace("data.n_samples=4", "data.n_samples=1 rollout.temperature=0")
    (ours,) = re.findall(r"\| arithmetic \| 20 \| 20 \| ([\d.]+) \|", bash(fine_tuned, greedy))
    assert float(theirs) == pytest.approx(float(ours), abs=1e-3)


@pytest.mark.slow
def test_an_adapter_is_trained_and_merged_as_printed(fine_tuned):
    bash(fine_tuned, block(LORA, "verl train grpo"), total_training_steps="2", save_freq="2")
    saved = fine_tuned / "my/lora/global_step_2/actor/huggingface"
    assert (saved / "adapter_model.safetensors").is_file() and not (saved / "model.safetensors").exists()
    bash(fine_tuned, block(LORA, "python -m verl.model_merger").replace("global_step_15", "global_step_2"))
    assert (fine_tuned / "my/merged/model.safetensors").is_file()

"""PF-PPO is settings of the library: what its page says of the weights, and that its command resolves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from recipe.pf_ppo.main_pf_ppo import PF_PPO
from tests.harness.configs import changed
from tests.harness.runs import train
from verl.algorithms.reweighting import reweight_probabilities


def test_the_page_has_the_chances_of_three_scores(project_root: Path):
    page = (project_root / "recipe/pf_ppo/README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\d./, ]+) \|$", page, re.MULTILINE)
    assert [method for method, _ in rows] == ["pow", "max_min", "max_random"]
    for method, chances in rows:
        expected = [float(a) / float(b or 1) for a, _, b in (x.strip().partition("/") for x in chances.split(","))]
        assert reweight_probabilities(torch.tensor([1.0, 0.5, 0.0]), method).tolist() == pytest.approx(
            expected, abs=1e-6
        )


def test_a_step_learns_from_rows_that_were_drawn_by_their_scores(lower_case_task: Path):
    words = changed(PF_PPO, "data.train_files=train.jsonl", "reward.custom_reward_function.path=scorer.py")
    (step,) = train(*words).metrics
    assert 0 < step["training/pf_ppo/distinct_rows"] < 1
    assert step["critic/grad_norm"] > 0 and step["actor/grad_norm"] > 0

"""Runs on TorchTitan's models are the runs of the plain engine, supervised and by rewards."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.ranks import run_cells
from tests.harness.runs import logged_steps, prepare
from tests.harness.scorers import scorer
from tests.harness.training_programs import PROGRAMS, STEPS, SftCell
from verl.models.hf_folder import read_weights

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="TorchTitan is not installed")
SFT = PROGRAMS["sft"]
A = "actor_rollout_ref.actor"


def test_grpo_gives_the_numbers_of_the_plain_engine_also_after_its_checkpoint(workplace):
    """With prompts shared in a group, a KL to a reference, and weights handed to the sampler before every step."""
    prepare(scorer("len(solution_str) % 5"), 6, family="qwen3")
    common = ("data.train_batch_size=2", "data.max_response_length=6", f"{A}.ppo_mini_batch_size=2",
              f"{A}.use_kl_loss=true", f"{A}.optim.lr=1e-3", "trainer.total_training_steps=3", "trainer.save_freq=2",
              "trainer.device=cpu")  # fmt: skip
    plain = logged_steps("plain", *common)
    titan = logged_steps("titan", *common, "model_engine=torchtitan")
    (again,) = logged_steps("again", *common, "model_engine=torchtitan", "trainer.resume_mode=resume_path",
                            "trainer.resume_from_path=titan/global_step_2")  # fmt: skip
    names = ("actor/loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean")
    for name in names:
        assert [s[name] for s in titan] == pytest.approx([s[name] for s in plain], rel=1e-4, abs=1e-6), name
        assert again[name] == titan[2][name], name
    assert json.loads(Path("titan/global_step_2/actor/huggingface/config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.slow
def test_fine_tuning_with_shared_layers_or_in_stages_gives_the_curve_of_one_process(workplace):
    """Their checkpoints hold the weights under their names of the files."""
    SFT.prepare(workplace)
    tiny_model_dir(workplace / "model", "qwen3", tie_word_embeddings=False)  # as stages need it
    on_titan = ("engine=torchtitan", "trainer.device=cpu")
    cells = {
        name: SftCell(workplace, workplace / name, (*on_titan, f"engine.torchtitan.{name}=2"))
        for name in ("tensor_parallel_size", "pipeline_parallel_size")
    }
    run_cells(1, [SftCell(workplace, workplace / "plain")], workplace / "notes")
    plain, stored = SFT.metrics(workplace / "plain"), read_weights(workplace / "model")
    for name, cell in cells.items():
        run_cells(2, [cell], workplace / f"notes_{name}")
        shared = SFT.metrics(workplace / name)
        assert list(shared) == list(plain) == list(range(1, STEPS + 1))
        for step, expected in plain.items():
            # Tensor-parallel ranks get as many tokens each, so some rows have padding that others have not.
            names = [name for name in expected if name.startswith(("train/", "val/"))]
            names = [name for name in names if "time" not in name and name != "train/padding_waste"]
            assert "train/loss" in names
            assert {n: shared[step][n] for n in names} == pytest.approx({n: expected[n] for n in names}, rel=1e-4)
        assert SFT.weights(workplace / name).keys() == stored.keys()

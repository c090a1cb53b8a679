"""A run saved on two ranks goes on with one and with four: the same prompts, the same samples, the same losses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.harness import Server, assert_no_process_left, finish, grpo, metrics, prepare, samples

pytestmark = pytest.mark.dist

SETTINGS = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
COMPARED = ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/score/mean", "actor/entropy")


def run(server: Server, folder: Path, steps: int, ranks: int) -> None:
    finish(server, folder, [*grpo(steps), *SETTINGS, f"trainer.n_gpus_per_node={ranks}"])


def test_saved_on_two_ranks_it_goes_on_with_one_and_with_four(server: Server, tmp_path):
    run(server, prepare(tmp_path / "2"), 2, ranks=2)
    for ranks in (1, 4):
        shutil.copytree(tmp_path / "2", tmp_path / str(ranks))
    for ranks in (2, 1, 4):
        run(server, tmp_path / str(ranks), 3, ranks)
        assert_no_process_left(tmp_path / str(ranks))

    expected = metrics(tmp_path / "2")
    assert [row["step"] for row in expected] == [1, 2, 3]
    for ranks in (1, 4):
        folder = tmp_path / str(ranks)
        assert samples(folder) == samples(tmp_path / "2"), "the same rows in the same order, and what was sampled"
        found = metrics(folder)[-1]
        assert found["step"] == 3
        for name in COMPARED:
            if name in expected[-1]:
                assert found[name] == pytest.approx(expected[-1][name], rel=1e-5, abs=1e-6), f"{name} on {ranks}"
        assert {"actor/pg_loss", "actor/grad_norm"} <= set(found)

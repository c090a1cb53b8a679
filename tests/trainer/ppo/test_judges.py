"""Runs that start the servers of their judge: they are there for the reward function, and gone at the end."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.runs import logged, train
from tests.harness.served_judges import ASKING_SCORER, RM, score_of
from tests.harness.waiting import wait_until
from verl.config import load_config
from verl.errors import ConfigError, DataError
from verl.metrics import notices
from verl.rollout.lost import EngineLostError
from verl.trainer.ppo import judging, stages
from verl.trainer.ppo.callbacks import Callback
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

STARTED = (
    "reward_model.enable=true", f"{RM}.model_path=judge", f"{RM}.rollout.name=hf_server", "reward.timeout=3000",
    "reward.num_workers=2",
)  # fmt: skip


class Look(Callback):
    """Notes the processes of the judge while the run trains."""

    def __init__(self):
        self.processes: list[psutil.Process] = []

    def on_step_begin(self, trainer):
        started = trainer.judges._processes.values()
        self.processes += [psutil.Process(server.process.pid) for server in started]


class KillInFlight(Look):
    """Kills the judge's server once the first request of the step is in flight: it is stopped before that comes."""

    def on_step_begin(self, trainer):
        super().on_step_begin(trainer)
        (server,) = self.processes
        server.suspend()

        def kill():
            wait_until(lambda: sum(one.load for one in trainer.judges._service.replicas) > 0)
            os.kill(server.pid, signal.SIGKILL)

        self.killing = threading.Thread(target=kill)
        self.killing.start()


@pytest.fixture(scope="module")
def undisturbed(shared_here):
    """A run, and what it noted of its judge."""
    tiny_model_dir("judge", seed=5)
    Path("scorer.py").write_text(ASKING_SCORER)
    look = Look()
    return train(*STARTED, "trainer.experiment_name=undisturbed", watch=look), look


def scores_of(seen):
    (batch,) = seen.batches
    return batch.tensors["token_level_scores"].sum(-1).tolist()


@pytest.mark.slow
def test_a_run_starts_its_judge_and_ends_it(undisturbed):
    seen, look = undisturbed
    (batch,) = seen.batches
    answers = batch.non_tensor_batch["answer"]
    assert scores_of(seen) == pytest.approx([score_of(Path("judge").absolute(), text) for text in answers])
    assert len(set(scores_of(seen))) > 1, "the judge tells answers from one another"
    (server,) = look.processes
    assert not server.is_running()
    (step,) = logged("logs", "undisturbed")
    assert {name: step[f"reward_model/{name}"] for name in ("replicas", "restarts", "requests")} == {
        "replicas": 1, "restarts": 0, "requests": 16,
    }  # fmt: skip
    assert "sk-verl-" not in (Path(seen.trainer.config.trainer.default_local_dir) / "config.yaml").read_text()


@pytest.mark.slow
def test_a_judge_that_is_killed_in_the_middle_of_a_step_changes_no_score(undisturbed):
    seen, _ = undisturbed
    killer = KillInFlight()
    disturbed = train(*STARTED, "reward.while_sampling=true", "trainer.experiment_name=disturbed", watch=killer)
    killer.killing.join()
    assert scores_of(disturbed) == scores_of(seen)
    (step,) = logged("logs", "disturbed")
    assert step["reward_model/restarts"] == 1 and step["reward_model/requests"] == 16
    assert step["reward_model/resent"] >= 1 and step["reward/unscorable"] == 0
    assert "judge server 0 ended with signal SIGKILL" in notices()[f"{RM}, restart 1"]


@pytest.mark.slow
def test_a_judge_that_is_given_up_ends_the_run_before_an_update(undisturbed, monkeypatch):
    updates, train_role = [], stages.train
    monkeypatch.setattr(stages, "train", lambda role, *rest: updates.append(role) or train_role(role, *rest))
    killer = KillInFlight()
    with pytest.raises(EngineLostError, match=r"max_restarts: .*judge server 0 was lost 1 times in a row"):
        train(*STARTED, f"{RM}.rollout.server.max_restarts=0", "trainer.experiment_name=lost", watch=killer)
    killer.killing.join()
    assert not updates


@pytest.mark.slow
def test_a_run_that_cannot_begin_ends_its_servers(undisturbed, monkeypatch):
    seen = []

    def fail(trainer):
        seen.extend(psutil.Process(server.process.pid) for server in trainer.judges._processes.values())
        raise DataError("no validation today", key="data.val_files")

    monkeypatch.setattr(RayPPOTrainer, "_begin", fail)
    with pytest.raises(DataError, match="no validation today"):
        train(*STARTED, "trainer.experiment_name=unbegun")
    (server,) = seen
    assert not server.is_running()


def test_gpus_of_servers_follow_those_of_the_workers(here, monkeypatch):
    tiny_model_dir("judge")
    words = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "trainer.device=cpu",
             "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "data.train_batch_size=4",
             "actor_rollout_ref.actor.ppo_mini_batch_size=4", "reward.custom_reward_function.path=scorer.py",
             *STARTED, f"{RM}.enable_resource_pool=true", f"{RM}.nnodes=1", f"{RM}.n_gpus_per_node=2"]  # fmt: skip
    config = load_config("ppo_trainer", words)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert judging.gpus_of_judges(config, 2, ExitStack()) == ["5", "7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match=r"2 server\(s\) of 1 GPU\(s\) each do not fit: 1 are the workers'"):
        judging.gpus_of_judges(config, 2, ExitStack())
    shared = load_config("ppo_trainer", [*words[:-3], f"{RM}.rollout.data_parallel_size=2"])
    assert judging.gpus_of_judges(shared, 2, ExitStack()) == ["4", "5"]

"""Which engine a worker may have among its peers."""

from __future__ import annotations

import mmap

import pytest

from tests.harness.engines import ragged_batch
from tests.harness.models import tiny_model_dir
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig, FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.config.loading.configuration import read_config
from verl.engines.plain import PlainEngine
from verl.errors import ConfigError, WorkerError
from verl.single_controller.base.worker import WorkerInfo
from verl.trainer import models
from verl.workers.model import ModelWorker
from verl.workers.options import InferOptions
from verl.workers.part import ModelPart, make_engine, watched_memory

TWO = WorkerInfo(rank=0, world_size=2, master_port=1)


@pytest.fixture
def arguments(tmp_path):
    model = HFModelConfig(path=str(tiny_model_dir(tmp_path)))
    return {"model": model, "engine": FSDPEngineConfig(), "device": "cpu"}


def test_several_workers_do_not_train_copies_of_their_own(arguments):
    with pytest.raises(ConfigError, match=r"strategy.*2 workers.*fsdp2"):
        make_engine("plain", TWO, optim=OptimizerConfig(), **arguments)


def test_a_frozen_model_may_be_whole_on_every_worker(arguments):
    assert isinstance(make_engine("plain", TWO, optim=None, **arguments), PlainEngine)


def test_workers_of_one_process_cannot_shard_a_model_and_nobody_waits_for_peers(arguments, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(WorkerError, match=r"one process per worker.*runtime=ray"):
        make_engine("fsdp2", TWO, optim=None, **arguments)


def test_one_worker_needs_no_peers(arguments):
    assert isinstance(make_engine("plain", WorkerInfo(), optim=OptimizerConfig(), **arguments), PlainEngine)


def test_memory_around_a_phase_is_a_metric():
    with mmap.mmap(-1, 50 << 20) as held, watched_memory("generate", "cpu") as found:
        for page in range(0, len(held), mmap.PAGESIZE):  # new ones: an allocator may have freed ones that are resident
            held[page] = 1
    before, after = (found[f"perf/memory/generate/{moment}/host_gb"] for moment in ("before", "after"))
    assert after.value - before.value > 0.04 and after.reduction == "max"


@pytest.mark.parametrize(
    ("name", "switch", "key"),
    [
        ("actor", "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz", "rollout.log_prob_max_token_len_per_gpu"),
        ("ref", "actor_rollout_ref.ref.log_prob_use_dynamic_bsz", "ref.log_prob_max_token_len_per_gpu"),
    ],
)
def test_an_error_while_a_model_runs_names_the_setting_of_its_role(name, switch, key, tmp_path):
    folder, budget = tiny_model_dir(tmp_path), f"actor_rollout_ref.{key}"
    words = [f"actor_rollout_ref.model.path={folder}", f"{switch}=true", f"{budget}=3"]
    config = read_config("ppo_trainer", [*words, "trainer.device=cpu"])
    worker = ModelWorker(models.model_roles(config)[name])
    worker.init_model()
    with pytest.raises(ConfigError, match="longest row") as caught:
        worker.infer(ragged_batch(rows=4), InferOptions(("log_probs",)))
    assert caught.value.key == budget


@pytest.mark.parametrize(("is_mini_batch", "steps"), [(True, [5]), (False, [2, 2, 1])])
def test_a_mini_batch_is_one_optimizer_step_whatever_its_rows(arguments, monkeypatch, is_mini_batch, steps):
    """Trajectories of the same sample, and rows that fill up the ranks, are more rows than samples."""
    engine = make_engine("plain", WorkerInfo(), optim=OptimizerConfig(), **arguments)
    trained, train_batch = [], engine.train_batch

    def noted(batch, *how, **named):
        trained.append(len(batch))
        return train_batch(batch, *how, **named)

    monkeypatch.setattr(engine, "train_batch", noted)
    part = ModelPart(engine, loss_fn=PPOPolicyLoss(ActorConfig()), mini_batch_rows=2)
    part.train(ragged_batch(rows=5), is_mini_batch=is_mini_batch)
    assert trained == steps

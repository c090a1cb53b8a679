"""How weights reach the sampler changes no number: in the background, and over every transport to its own process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.runs import Seen, numbers, train
from verl.errors import RolloutError
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.hosted import HostedSampler
from verl.weight_sync import SharedMemoryTransport

STEPS = ("trainer.total_training_steps=3", "actor_rollout_ref.actor.optim.lr=1e-2")
ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"


def the_same(one: Seen, other: Seen) -> bool:
    """Bitwise: samples, the sampler's log-probs, versions of the weights, and every metric."""
    assert len(one.batches) == len(other.batches) == 3
    for mine, theirs in zip(one.batches, other.batches):
        for name in ("responses", "rollout_log_probs", "token_versions", "advantages"):
            assert torch.equal(mine.batch[name], theirs.batch[name]), name
    return [numbers(step) for step in one.metrics] == [numbers(step) for step in other.metrics]


def sampler_of(seen: Seen):
    (worker,) = seen.trainer.roles["rollout"].group.workers
    (sampler,) = worker.replicas.values()
    return sampler


def test_weights_that_arrive_in_the_background_give_the_numbers_of_a_run_that_waits(here):
    waits = train(*STEPS, "trainer.default_local_dir=a")
    goes_on = train(*STEPS, "trainer.default_local_dir=b", "trainer.async_weight_update=true", "trainer.save_freq=3",
                    "trainer.rollout_data_dir=dumps")  # fmt: skip
    assert the_same(waits, goes_on)
    assert [v.item() for batch in goes_on.batches for v in batch.batch["token_versions"].max()[None]] == [0, 1, 2]
    assert sampler_of(goes_on).version == 3, "the last weight sync has ended with the run"
    assert len(list(Path("dumps").glob("*.jsonl"))) == 3


def test_the_step_goes_on_while_weights_are_on_their_way_and_sampling_waits_for_them(here, monkeypatch):
    """The weight sync ends only when the step's samples lie on disk: a run that waited for it would never end."""
    order: list[str] = []
    update = HFSampler.update_weights

    async def slow(self, chunks, version):
        if version:
            import asyncio

            for _ in range(2400):
                if Path(f"dumps/{version}.jsonl").exists():
                    break
                await asyncio.sleep(0.05)
            order.append(f"{version} arrives, dumped: {Path(f'dumps/{version}.jsonl').exists()}")
        await update(self, chunks, version)

    monkeypatch.setattr(HFSampler, "update_weights", slow)
    train(*STEPS, "trainer.async_weight_update=true", "trainer.rollout_data_dir=dumps")
    assert order == [f"{step} arrives, dumped: True" for step in (1, 2, 3)]


def test_an_error_in_the_background_ends_the_run_with_that_error(here, monkeypatch):
    update = HFSampler.update_weights

    async def failing(self, chunks, version):
        if version == 1:
            raise RolloutError("this sampler takes no more weights")
        await update(self, chunks, version)

    monkeypatch.setattr(HFSampler, "update_weights", failing)
    with pytest.raises(RolloutError, match="takes no more weights"):
        train(*STEPS, "trainer.async_weight_update=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    ["shared_memory", "gloo", "disk", "delta"],
)
def test_a_sampler_in_a_process_of_its_own_gives_the_numbers_of_one_in_this_process(here, backend, monkeypatch):
    made, begin = [], SharedMemoryTransport.__init__

    def noted(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        made.append(Path(self.path))

    monkeypatch.setattr(SharedMemoryTransport, "__init__", noted)
    inside = train(*STEPS, "trainer.default_local_dir=a")
    outside = train(*STEPS, "trainer.default_local_dir=b", f"{ENGINE}.backend={backend}")
    sampler = sampler_of(outside)
    try:
        assert isinstance(sampler, HostedSampler) and sampler.version == 3
        assert the_same(inside, outside)
        assert sampler.stats()["weight_updates"] == 4
        if backend == "delta":
            assert sampler._transport.encoder.ratio > 0.5
    finally:
        sampler.close()
    assert len(made) == (backend in ("shared_memory", "delta")) and not any(path.exists() for path in made)

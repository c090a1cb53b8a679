"""One end of a pair of trainer and sampler is gone for good, or where they meet: no waiting, no orphan, an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.harness.models import tiny_model_dir
from verl.errors import RolloutError
from verl.weight_sync import BroadcastTransport, DiskTransport, chunk_weights
from verl.weight_sync.transport import PeerFailedError

TRAINER = """
import sys, time
from verl.config.loading.configuration import read_config
from verl.rollout.place import place_sampler

policy = read_config("ppo_trainer", sys.argv[1:]).actor_rollout_ref
sampler = place_sampler(policy.rollout, policy.model, "cpu")
print(sampler._handle.process.process.pid, flush=True)
time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    """Gone, or a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
def test_a_samplers_process_ends_when_its_trainer_is_killed(tmp_path):
    keys = [f"actor_rollout_ref.model.path={tiny_model_dir(tmp_path / 'model')}",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory"]  # fmt: skip
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, *keys], stdout=subprocess.PIPE, text=True)
    child = int(trainer.stdout.readline())
    assert not has_ended(child)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    deadline = time.monotonic() + 60
    while not has_ended(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert has_ended(child)


def weights():
    return chunk_weights([("a", torch.zeros(3))], 1 << 10, 1)


def test_a_broadcast_to_a_sampler_that_never_came_ends_as_soon_as_somebody_knows():
    end = BroadcastTransport.begin(1 << 20, timeout=300.0)
    threading.Timer(0.1, end.abandon, ["it was killed"]).start()
    with pytest.raises(PeerFailedError, match=r"the sampler to join the group.*it was killed"):
        end.send(weights())  # not that it waited for 300 s


def test_a_broadcast_to_a_sampler_that_never_came_says_so_after_one_timeout():
    with pytest.raises(RolloutError, match="waited 0 s for the sampler to join the group"):
        BroadcastTransport.begin(1 << 20, timeout=0.2).send(weights())


@pytest.mark.parametrize("folder", ["/proc/weights", "file/weights"])
def test_a_folder_for_weights_that_cannot_be_written_is_named(tmp_path, folder):
    (tmp_path / "file").write_text("not a folder")
    place = tmp_path / folder
    with pytest.raises(RolloutError, match=r"engine_kwargs.folder: the folder for weights cannot be written") as caught:
        DiskTransport(place).send(weights())
    assert caught.value.got == str(place)

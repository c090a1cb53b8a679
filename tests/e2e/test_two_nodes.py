"""The quickstart's task on two nodes, with the cluster made by the commands that a user types."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.programs import command, curve, metrics
from verl.ports import free_port

pytestmark = pytest.mark.slow
ACCURACY = "val-core/arithmetic/reward/mean@1"
RAY = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1", "--object-store-memory=120000000"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """``ray start --head`` and ``ray start --address=...``; gives the variables with which a run finds it."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets lie in it, and their names have to be short
    found = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **found}
    environment.pop("RAY_ADDRESS", None)
    address = f"127.0.0.1:{free_port()}"
    head = ["--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false"]
    started = []
    try:
        for words in (head, [f"--address={address}"]):
            said = Path(folder, f"node{len(started)}.log")
            with said.open("w") as log:
                started.append(subprocess.Popen([*RAY, *words], env=environment, stdout=log, stderr=log))
            for _ in range(240):
                text = said.read_text()
                if "Ray runtime started" in text:
                    break
                assert started[-1].poll() is None, text
                time.sleep(0.25)
        yield {**found, "RAY_ADDRESS": address}
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def test_grpo_learns_on_two_nodes_and_prints_the_node_of_every_rank(arithmetic, cluster):
    name = "two_nodes"
    words = [
        *arithmetic.arguments,
        "algorithm.adv_estimator=grpo",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={name}",
        "trainer.total_training_steps=10",
        "trainer.test_freq=10",
    ]
    environment = {
        **cluster,
        "VERL_LOGGING_LEVEL": "INFO",
        "RAY_DEDUP_LOGS": "0",  # Ray holds back a line that another rank wrote except for its numbers
    }
    done = command("verl.trainer.main_ppo", *words, cwd=arithmetic.folder, **environment)
    lines = [line for line in done.stderr.splitlines() if "]: node " in line]
    print("\n".join(lines))
    assert len(lines) == 2 and len({line.split("]: node ")[1].split()[0] for line in lines}) == 2
    said = done.stdout + done.stderr
    assert all(f"rank {rank} of 2 ranks joined the group over gloo" in said for rank in (0, 1))
    before, *_, after = curve(metrics(arithmetic.folder, "e2e", name), ACCURACY)
    assert before <= 0.6
    assert after >= 0.9

"""Supervised runs: killed or asked to stop, in one process and under torchrun, they go on with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.forked_runs import ROOT, Server, assert_no_process_left, metrics, weights
from tests.harness.models import tiny_model_dir
from tests.harness.rows import talks, write_prompts
from tests.harness.waiting import HANGS
from verl.checkpoint import list_checkpoints

pytestmark = pytest.mark.slow

STEPS = 4
SFT = [
    "data.train_files=train.parquet",
    "data.train_batch_size=4",
    "data.max_length=64",
    "model.path=model",
    "optim.lr=1e-2",
    "trainer.save_freq=1",
    "trainer.default_local_dir=run",
    "trainer.logger=[file]",
    "trainer.device=cpu",
    f"trainer.total_training_steps={STEPS}",
]


def prepare(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model_dir(folder / "model", hidden=16, layers=1, heads=2, kv_heads=1)
    write_prompts(folder / "train.parquet", talks(12))
    return folder


def newest_step(folder: Path) -> int:
    return list_checkpoints(folder / "run")[0].step


def test_a_supervised_run_that_is_killed_and_stopped_ends_with_the_bits_of_an_undisturbed_one(server: Server, tmp_path):
    whole, hit = prepare(tmp_path / "whole"), prepare(tmp_path / "hit")
    ended = server.start(whole, SFT, program="sft_trainer").wait()
    assert ended.status == 0, ended.output[-2000:]

    ended = server.start(hit, SFT, "manifest:2:KILL", "sft_trainer").wait()
    assert ended.status == -signal.SIGKILL and newest_step(hit) == 1
    ended = server.start(hit, SFT, "load:1:TERM", "sft_trainer").wait()
    assert ended.status == 143 and newest_step(hit) == 2, "the step after the load is saved"
    rarely = [*SFT, "trainer.save_freq=100"]
    ended = server.start(hit, rarely, "backward:1:TERM", "sft_trainer").wait()
    assert ended.status == 143, ended.output[-2000:]
    assert "SIGTERM: stopped after step 3, which is saved in" in ended.output and "Traceback" not in ended.output
    assert newest_step(hit) == 3
    ended = server.start(hit, SFT, program="sft_trainer").wait()
    assert ended.status == 0

    one, other = weights(whole / f"run/global_step_{STEPS}"), weights(hit / f"run/global_step_{STEPS}")
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)
    times = ("train/time(s)",)
    logged = [[{k: v for k, v in row.items() if k not in times} for row in metrics(run)] for run in (whole, hit)]
    assert logged[0] == logged[1] and [row["step"] for row in logged[0]] == [1, 2, 3, 4]


def test_under_torchrun_one_rank_that_gets_the_signal_stops_all_after_the_same_step(tmp_path):
    folder = prepare(tmp_path)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VERL_FILE_LOGGER_ROOT": str(folder / "logs"),
        "VERL_TEST_RUN": str(folder),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    endless = [*SFT, "trainer.total_training_steps=100000", "trainer.save_freq=100000"]
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(
            [*torchrun, "-m", "verl.trainer.sft_trainer", *endless],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
        )
        end = time.monotonic() + HANGS
        while not list((folder / "logs").rglob("*.jsonl")):
            assert process.poll() is None and time.monotonic() < end, (folder / "output.txt").read_text()[-3000:]
            time.sleep(0.1)
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGTERM)
        process.wait(HANGS)
    told = (folder / "output.txt").read_text()
    assert process.returncode != 0
    assert "SIGTERM: stopped after step" in told, told[-3000:]
    assert newest_step(folder) == metrics(folder)[-1]["step"]
    assert_no_process_left(folder)

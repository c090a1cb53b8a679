"""Supervised fine-tuning as torchrun starts it on two ranks."""

from __future__ import annotations

import pytest

from tests.harness.programs import command
from tests.harness.ranks import TIMEOUT
from tests.harness.training_programs import PROGRAMS, STEPS, sft_arguments

pytestmark = pytest.mark.slow

SFT = PROGRAMS["sft"]


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    """Runs the program with some settings changed; its run folder and how it ended."""
    folder = tmp_path_factory.mktemp("torchrun")
    SFT.prepare(folder)

    def go(name: str, *changes: str) -> tuple:
        root = folder / name
        launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "verl.trainer.sft_trainer")
        place = {"OMP_NUM_THREADS": "1", "VERL_FILE_LOGGER_PATH": str(root / "metrics.jsonl")}
        words = [*sft_arguments(folder, root), *changes]
        return root, command(*launcher, *words, timeout=TIMEOUT, check=False, **place)

    return go


def test_the_command_trains_on_two_ranks_and_only_rank_0_speaks(torchrun):
    root, done = torchrun("run", "trainer.n_gpus_per_node=2", "trainer.device=cpu")
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = SFT.metrics(root)
    assert list(metrics) == list(range(1, STEPS + 1)) and metrics[STEPS]["train/loss"] < metrics[1]["train/loss"]
    assert sorted(SFT.weights(root)) and (root / "config.yaml").is_file()
    assert done.stderr.count("clip_grad") <= 1 and done.stderr.count("notice") == done.stdout.count("notice") == 0


@pytest.fixture(scope="module")
def apart(torchrun):
    """Metrics of a run whose ranks share nothing but weights."""
    return SFT.metrics(torchrun("apart", "engine.strategy=fsdp")[0])


def test_ranks_that_share_sequences_give_the_same_curve(torchrun, apart):
    shared, done = torchrun("together", "engine.strategy=fsdp", "engine.ulysses_sequence_parallel_size=2")
    assert done.returncode == 0, done.stderr[-4000:]
    found, expected = SFT.metrics(shared), apart
    for step in range(1, STEPS + 1):
        names = [name for name in expected[step] if "time" not in name]
        assert {n: found[step][n] for n in names} == pytest.approx({n: expected[step][n] for n in names}, rel=1e-5)


def test_a_wrong_setting_is_told_once(torchrun):
    _, done = torchrun("wrong", "engine.strategy=plain")
    assert done.returncode != 0
    assert done.stderr.count("error: engine.strategy: the plain engine trains in one process, and 2 were started") == 1

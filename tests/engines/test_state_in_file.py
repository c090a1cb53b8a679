"""On a CPU the optimizer's state waits in a file: memory falls, no bit changes, and it can be saved meanwhile."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile

import pytest
import torch

from tests.engines.builders import make_engine, model_dir, ragged_batch
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.engines.state_in_file import in_file
from verl.errors import EngineError
from verl.metrics import notices, reset_notices


def train(engine, steps: int = 3) -> None:
    for seed in range(steps):
        engine.train_batch(ragged_batch(seed=seed), PPOPolicyLoss(ActorConfig()))
        engine.step_scheduler()


def states(engine) -> list[torch.Tensor]:
    return [entry for entries in engine.optimizer.state.values() for entry in entries.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_file_gives_every_bit_back_and_later_writes_stay_apart(dtype):
    tensors = [torch.randn(shape).to(dtype) for shape in ((3,), (5, 7), (1, 1, 33), (2, 1000))]
    tensors[0][0], tensors[1][0, 0], tensors[2][0, 0, 0] = float("nan"), -0.0, float("inf")
    kept = [tensor.clone() for tensor in tensors]
    found = in_file(tensors)
    for tensor in tensors:
        tensor.zero_()
    for mine, expected in zip(found, kept):
        assert mine.dtype == dtype and torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))


def test_a_run_whose_state_waits_in_a_file_has_the_bits_of_one_whose_state_stays(tmp_path):
    path = model_dir(tmp_path)
    stays, waits = make_engine(path), make_engine(path, engine={"optimizer_offload": True})
    train(stays), train(waits)
    saved, expected = waits.state(), stays.state()  # read while it waits
    assert saved.tensors.keys() == expected.tensors.keys()
    assert sum(name.endswith("exp_avg_sq") for name in expected.tensors) > 10
    assert all(torch.equal(saved.tensors[name], expected.tensors[name]) for name in expected.tensors)
    again = make_engine(path, engine={"optimizer_offload": True})
    again.load_state(saved)
    train(again), train(waits), train(stays)
    for engine in (again, waits):
        for mine, theirs in zip(engine.model.parameters(), stays.model.parameters()):
            assert torch.equal(mine, theirs)


def memory_of_a_waiting_state(folder: str) -> None:
    """Runs in a process of its own, where nothing else frees or takes memory."""
    import pathlib

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    engine = make_engine(model_dir(pathlib.Path(folder), hidden_size=256, intermediate_size=1024, num_hidden_layers=6))
    train(engine, 1)
    size, before = sum(entry.nbytes for entry in states(engine)), resident()
    engine.offload(params=False)
    after = resident()
    assert size > 30 << 20, size
    assert before - after >= 0.8 * size, (size, before, after)
    engine.onload()
    assert resident() - after >= 0.8 * size
    print("freed")


def test_memory_falls_by_the_size_of_the_state_while_it_waits(tmp_path):
    words = "import sys; from tests.engines import test_state_in_file as t; t.memory_of_a_waiting_state(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", words, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.stdout.strip().endswith("freed"), done.stderr


def test_no_room_for_the_file_is_an_error_that_names_the_setting_and_the_folder(tmp_path, monkeypatch):
    engine = make_engine(model_dir(tmp_path))
    train(engine, 1)

    def full(**arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(EngineError, match="No space left") as caught:
        engine.offload()
    assert "optimizer_offload" in str(caught.value) and tempfile.gettempdir() in str(caught.value)
    assert all(torch.isfinite(entry).all() for entry in states(engine))


def test_weights_stay_on_a_cpu_and_a_notice_says_so(tmp_path):
    reset_notices()
    make_engine(model_dir(tmp_path), engine={"param_offload": True})
    assert any("param_offload" in key for key in notices())

"""A save that is written while training goes on, and one that waits for its step to be logged."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.checkpoint.builders import assert_holds, save, state, write_hf
from tests.harness.waiting import wait_until
from verl.checkpoint import (
    BackgroundPart,
    CheckpointWriter,
    EngineState,
    find_checkpoint,
    list_checkpoints,
    read_part,
    write_part,
)
from verl.errors import CheckpointError

WAIT = 60.0


def steps(root) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(root)]


def test_a_held_save_is_no_checkpoint_until_it_is_released(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        save(writer, 1)
        folder = writer.save(2, {"actor": state(2)}, hf={"actor": write_hf}, trainer_state={"step": 2}, hold=True)
        writer.advance()
        assert steps(tmp_path) == [1] and not folder.exists()
        writer.release()
        assert steps(tmp_path) == [2, 1]


def test_closing_puts_a_held_save_in_place(tmp_path):
    """A step that fails after its save (a validation, say) has still been trained."""
    with pytest.raises(ZeroDivisionError), CheckpointWriter(tmp_path) as writer:
        writer.save(1, {"actor": state(1)}, hold=True)
        raise ZeroDivisionError
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("background", [False, True])
def test_a_held_save_that_is_discarded_leaves_the_checkpoint_before(tmp_path, background):
    with CheckpointWriter(tmp_path, background=background) as writer:
        save(writer, 1)
        assert not writer.discard(), "it is released"
        writer.save(2, {"actor": state(2)}, hold=True)
        assert writer.discard()
    assert steps(tmp_path) == [1] and not list(tmp_path.glob(".writing*"))


def test_advance_puts_a_background_save_in_place_once_it_is_written(tmp_path):
    gate = threading.Event()

    def slow_hf(folder, weights):
        gate.wait(WAIT)
        write_hf(folder, weights)

    with CheckpointWriter(tmp_path, background=True) as writer:
        writer.save(1, {"actor": state(1)}, hf={"actor": slow_hf}, trainer_state={"step": 1, "kl": 0.1})
        writer.advance()
        assert steps(tmp_path) == [], "training goes on meanwhile"
        gate.set()
        wait_until(lambda: (writer.advance(), steps(tmp_path))[1])
        writer.wait()
    assert_holds(find_checkpoint(tmp_path), 1)


class Elsewhere:
    """A role that another process writes."""

    def __init__(self, folder, value):
        self.folder, self.value, self.done = folder, value, False

    def poll(self):
        return self.wait() if self.done else None

    def wait(self):
        return write_part(self.folder, state(self.value), hf=write_hf)


def test_a_role_that_is_written_elsewhere_is_asked_until_it_is_done(tmp_path):
    begun = []

    def start(folder):
        begun.append(Elsewhere(folder, 3))
        return begun[0]

    with CheckpointWriter(tmp_path, background=True) as writer:
        writer.save(3, {"actor": start, "critic": state(3)}, trainer_state={"step": 3, "kl": 0.1 * 3})
        for _ in range(3):
            writer.advance()
        assert steps(tmp_path) == []
        begun[0].done = True
        wait_until(lambda: (writer.advance(), steps(tmp_path))[1])
        writer.wait()
    assert_holds(find_checkpoint(tmp_path), 3)
    assert_holds(find_checkpoint(tmp_path), 3, "critic")


def test_a_role_that_fails_elsewhere_is_one_error_and_leaves_nothing_behind(tmp_path):
    class Broken(Elsewhere):
        def wait(self):
            raise OSError(28, "No space left on device")

    with CheckpointWriter(tmp_path, background=True) as writer:
        save(writer, 1)
        writer.save(2, {"actor": lambda folder: Broken(folder, 2)})
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*No space left.*global_step_1"):
            writer.wait()
        assert steps(tmp_path) == [1] and not list(tmp_path.glob(".writing-*"))
        writer.wait()  # told once


def test_a_part_in_the_background_keeps_its_memory_from_save_to_save(tmp_path):
    part, live = BackgroundPart(), {"model/w": torch.zeros(64), "optimizer/w/exp_avg": torch.zeros(64)}
    where = set()
    for value in (1, 2, 3):
        for tensor in live.values():
            tensor.fill_(value)
        part.start(tmp_path / str(value), EngineState(live, {"model": {}, "optimizer": {}}), ("model", "optimizer"))
        for tensor in live.values():
            tensor.fill_(-1)
        records = part.wait()
        assert set(records) == {"model.safetensors", "optimizer.safetensors", "extra.json"}
        where.add(tuple(buffer.data_ptr() for buffer in part._buffers.values()))
        assert read_part(tmp_path / str(value), ("model",)).tensors["model/w"].tolist() == [value] * 64
    assert len(where) == 1

"""A supervised run has as many processes as torchrun started, and says so where the configuration says otherwise."""

from __future__ import annotations

import pytest

from verl import device
from verl.config import SFTTrainerConfig, replace
from verl.config.machine.host import processes


@pytest.fixture
def check(monkeypatch):
    def go(started: int, **settings) -> list[str]:
        monkeypatch.setenv("WORLD_SIZE", str(started))
        named = {key.replace("__", "."): value for key, value in settings.items()}
        return [str(problem) for problem in processes(replace(SFTTrainerConfig(), **named))]

    return go


def test_what_was_started_is_used_where_nothing_else_is_said(check):
    assert check(1) == check(8) == check(8, trainer__n_gpus_per_node=4, trainer__nnodes=2) == []


def test_more_processes_than_were_started_are_refused_with_the_command_that_starts_them(check):
    (told,) = check(1, trainer__n_gpus_per_node=8)
    assert "trainer.n_gpus_per_node: 8 processes are requested, and 1 was started" in told
    assert "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer" in told
    (told,) = check(8, trainer__n_gpus_per_node=8, trainer__nnodes=2)
    assert "trainer.nnodes: 16 processes" in told and "--nnodes=2 --nproc_per_node=8" in told


def test_more_processes_than_are_asked_for_are_all_used(check):
    assert check(8, trainer__n_gpus_per_node=1) == []


def test_every_process_needs_a_gpu_of_its_own(check, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert check(4) == []
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(device, "device_count", lambda kind: 2)
    (told,) = check(4)
    assert "--nproc_per_node: torchrun started 4 processes on this machine, which has 2 GPUs" in told
    assert check(4, trainer__device="cpu") == []


def test_the_engine_of_one_device_is_refused_on_several(check):
    assert check(1, engine__strategy="plain") == []
    assert "engine.strategy: the plain engine" in check(2, engine__strategy="plain")[0]

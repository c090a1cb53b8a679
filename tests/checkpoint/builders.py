"""States and savers small enough to save a hundred times."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from verl.checkpoint import CheckpointReader, CheckpointWriter, EngineState


def state(value: float) -> EngineState:
    """A state whose every number says which save it belongs to."""
    return EngineState(
        {
            "model/w": torch.full((40, 30), value),
            "model/b": torch.full((3,), value, dtype=torch.bfloat16),
            "optimizer/w/exp_avg": torch.full((40, 30), 2 * value),
            "extra/rng/cpu": torch.full((7,), int(value), dtype=torch.uint8),
        },
        {"model": {"architecture": "Tiny"}, "optimizer": {"class": "Adam"}, "extra": {"scheduler_step": int(value)}},
    )


def write_hf(folder: Path, weights: Iterable[tuple[str, Tensor]] | None) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if weights is not None:
        save_file(dict(weights), folder / "model.safetensors")


def save(writer: CheckpointWriter, step: int, parts: tuple[str, ...] = ("actor",)) -> Path:
    return writer.save(
        step,
        {part: state(step) for part in parts},
        hf=dict.fromkeys(parts, write_hf),
        trainer_state={"step": step, "kl": 0.1 * step},
    )


def assert_holds(folder: Path, step: int, part: str = "actor") -> None:
    """The folder is the complete save of ``step``, to the last bit."""
    reader = CheckpointReader(folder)
    found, expected = reader.load(part), state(step)
    assert reader.step == step and reader.trainer_state() == {"step": step, "kl": 0.1 * step}
    assert found.scalars == expected.scalars
    assert set(found.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor), name

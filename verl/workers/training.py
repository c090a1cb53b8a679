"""The worker of any single model: what the critic is, and what a recipe's extra roles are made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.algorithms.losses import LossFn
from verl.checkpoint import EngineState, FileRecord, read_part, write_part
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.single_controller.base import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
)
from verl.workers.part import ModelPart, meshes_of
from verl.workers.profiling import ProfiledWorker


class TrainingWorker(ProfiledWorker):
    """One model that infers, trains, saves and loads; subclasses build ``self.part`` in `init_model`."""

    part: ModelPart

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: LossFn) -> None:
        """Replace the loss that `train_mini_batch` minimises."""
        self.part.loss_fn = loss_fn

    def meshes(self) -> dict[str, tuple[int, bool]]:
        return {**meshes_of(self, model=getattr(self, "part", None)), **super().meshes()}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="model"))
    def infer_batch(self, data: DataProto) -> DataProto:
        """``meta_info["outputs"]`` names what is computed; each output is (B, T) float32."""
        return DataProto.from_dict(tensors=self.part.infer(data, tuple(data.meta_info["outputs"])))

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn(mesh_name="model"))
    def train_mini_batch(self, data: DataProto) -> MetricSet:
        """Optimizer steps on ``data``; metrics are those of the loss, plus ``grad_norm`` and ``lr``."""
        return self.part.train(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, contents: tuple[str, ...] = ("model", "optimizer", "extra"), background: bool = False
    ) -> dict:
        """Write this model's state into ``local_path``; returns the records of the files (see `write_part`).

        With ``background`` it returns after copying the state, and `checkpoint_records` has the records later.
        """
        return save_part(self.part, local_path, contents, background=background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_records(self, wait: bool = False) -> Mapping[str, FileRecord] | None:
        """The records of a save in the background, or None while it is being written."""
        return saved_records(self.part, wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, contents: tuple[str, ...] = ("model", "optimizer", "extra")) -> None:
        """Continue from what `save_checkpoint` wrote."""
        load_part(self.part, local_path, contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_weights(self) -> dict[str, Tensor]:
        """The weights under Hugging Face names."""
        return dict(self.part.engine.export_weights())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Take over weights under Hugging Face names (reference refresh, moving averages)."""
        self.part.engine.load_weights(weights)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(self, device: str) -> None:
        """``cpu`` offloads model and optimizer, anything else brings them back."""
        if device == "cpu":
            self.part.engine.offload()
        else:
            self.part.engine.onload()


def save_part(
    part: ModelPart, folder: str, contents: tuple[str, ...], tokenizer: Any = None, background: bool = False
) -> dict:
    """Write one model's sections and its Hugging Face folder; only the first rank writes and returns records.

    With ``background`` only the copy is made before this returns; `saved_records` has the records.
    """
    engine = part.engine
    state, writer = engine.state(), engine.hf_writer(tokenizer)

    def write() -> dict[str, FileRecord]:
        if not background:
            return write_part(Path(folder), state, contents, writer)
        part.being_saved.start(Path(folder), state, contents, writer)
        return {}

    return engine.only_first(write) or {}


def saved_records(part: ModelPart, wait: bool) -> Mapping[str, FileRecord] | None:
    """What a save in the background has written, or None while it is at it; empty on all ranks but the first."""
    return part.being_saved.wait() if wait else part.being_saved.poll()


def load_part(part: ModelPart, folder: str, contents: tuple[str, ...]) -> None:
    """Load the sections in ``contents``, which only the first rank reads; the others stay as they are."""
    part.engine.load_state(part.engine.only_first(lambda: read_part(Path(folder), contents)) or EngineState())

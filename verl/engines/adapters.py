"""LoRA adapters in the dataflow: their folder in a checkpoint, and the base model as the reference policy."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl.checkpoint.files import FileRecord
from verl.checkpoint.part import HFWriter
from verl.checkpoint.tensors import write_tensors
from verl.engines.rows import MicroBatch
from verl.models import lora, nf4
from verl.protocol import DataProto
from verl.protocol.tokenizer import Tokenizer

if TYPE_CHECKING:
    from verl.engines.base import DataRank

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AdapterBaseEngine:
    """The model under an engine's adapter, as a frozen engine of its own: it shares every weight with that engine.

    Args:
        engine: one whose model has an adapter.
    """

    def __init__(self, engine: Any):
        self.engine = engine

    def infer(self, batch: DataProto, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """As `Engine.infer`, with the adapter switched off."""
        with self.engine.without_adapter():
            return self.engine.infer(batch, *args, **kwargs)

    @property
    def data_rank(self) -> DataRank | None:
        """That of the engine."""
        return self.engine.data_rank

    @property
    def packs(self) -> bool:
        """As the engine does."""
        return self.engine.packs

    def ready(self) -> AbstractContextManager[None]:
        """Nothing to do: what runs beside it is the engine that holds the weights."""
        return nullcontext()

    def logits(self, micro: MicroBatch, temperature: float) -> Tensor:
        """As `TorchEngine.logits`, with the adapter switched off."""
        with self.engine.without_adapter():
            return self.engine.logits(micro, temperature)


def adapter_writer(model: PreTrainedModel, base: str, tokenizer: Tokenizer | None) -> HFWriter:
    """Writes an adapter's folder: peft and transformers load it on top of the model at ``base``."""

    def write(folder: Path, weights: Iterable[tuple[str, Tensor]] | None) -> dict[str, FileRecord]:
        folder.mkdir(parents=True, exist_ok=True)
        lora.write_adapter_config(model, folder, base)
        nf4.write_rounding_record(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if weights is None:
            return {}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
        return {lora.WEIGHTS_FILE: write_tensors(folder / lora.WEIGHTS_FILE, tensors)}

    return write

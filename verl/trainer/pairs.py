"""Supervised training on pairs of answers: what DPO and reward models change of the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from verl import device as devices
from verl.algorithms.aggregation import LossNorm
from verl.algorithms.preference import MARGIN, REFERENCE_SUMS, answer_sums
from verl.checkpoint.tensors import read_tensors, write_tensors
from verl.config import DPOTrainerConfig, replace
from verl.data.preference import with_score_token
from verl.errors import CheckpointError
from verl.metrics import MetricSet
from verl.models.lora import LoraSettings
from verl.protocol import DataProto
from verl.trainer.supervised import SupervisedTrainer, supervised_batch
from verl.workers.part import Limits, ModelPart, base_of, local_model, make_engine

INDEX = "index"
STORED = "ref_sums.safetensors"


class PairTrainer(SupervisedTrainer):
    """Rows come in pairs (chosen, rejected); validation reports the loss and its metrics over all pairs."""

    together = 2

    def make_batch(self, rows: dict[str, Tensor]) -> DataProto:
        batch = supervised_batch(self.arrange(rows))
        cast(Any, batch.batch)[MARGIN] = rows[MARGIN]
        cast(Any, batch.batch)[INDEX] = rows[INDEX]
        return batch

    def arrange(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows as the model sees them."""
        return rows

    def validate(self) -> dict[str, float]:
        """``val/loss`` and ``val/<metric of the loss>``: means over the pairs of the validation rows."""
        assert self.val_loader is not None, "there is nothing to validate on"
        found: dict[str, float] = {}
        pairs = 0.0
        for rows in self.val_loader:
            batch = self.complete(self._share(self.make_batch(rows)), "val")
            if not len(batch):
                continue
            outputs = self.part.infer(batch, self.loss_fn.outputs)
            tokens = float(batch.tensors["response_mask"].sum())
            norm = LossNorm(dp_size=1, num_tokens=tokens, num_sequences=len(batch))
            loss, metrics = self.loss_fn(outputs, batch.batch, norm)
            here = len(batch) / 2
            values = {"loss": loss.item(), **MetricSet(metrics).values()}
            found = {name: found.get(name, 0.0) + here * value for name, value in values.items()}
            pairs += here
        names = sorted(found) or ["loss"]
        *sums, everyone = self.ctx.sum(*(found.get(name, 0.0) for name in names), pairs)
        return {f"val/{name}": total / max(everyone, 1.0) for name, total in zip(names, sums)}


class RMTrainer(PairTrainer):
    """A scalar head on the last token of each answer."""

    kind = "value"

    def arrange(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return with_score_token(rows)


class DPOTrainer(PairTrainer):
    """Adds the reference policy's log-probabilities of every answer to the rows of a step."""

    def __init__(self, config: DPOTrainerConfig, *arguments: Any, **named: Any):
        super().__init__(config, *arguments, **named)
        self.dpo = config.dpo
        self.stored: dict[str, Tensor] | None = None
        self.reference = None if self.dpo.reference_free else self._make_reference()

    def complete(self, batch: DataProto, split: str = "train") -> DataProto:
        tensors = cast(Any, batch.batch)
        if self.reference is not None:
            tensors[REFERENCE_SUMS] = self._sums(self.reference, batch)
        elif self.stored is not None and len(batch):
            tensors[REFERENCE_SUMS] = self.stored[split][tensors[INDEX], torch.arange(len(batch)) % 2]
        return batch

    def fit(self) -> None:
        if self.dpo.precompute_ref_log_probs and self.reference is not None:
            self._precompute(self.reference)
        super().fit()

    def _make_reference(self) -> ModelPart:
        c = self.config
        adapter = LoraSettings.of(c.model) is not None and self.dpo.ref_model_path is None
        if adapter:
            engine: Any = base_of(self.engine)
        else:
            model = replace(c.model, path=self.dpo.ref_model_path or c.model.path, lora_rank=0, lora_adapter_path=None)
            several = "fsdp2" if self.ctx.world_size > 1 else "plain"
            engine = make_engine(
                several if c.engine.strategy == "auto" else c.engine.strategy,
                model=local_model(model, "dpo.ref_model_path"),
                engine=c.engine,
                optim=None,
                kind="causal_lm",
                device=devices.resolve_device(c.trainer.device),
                seed=c.trainer.seed,
            )
        data = c.data
        limits = Limits.of(data.micro_batch_size_per_gpu, None, data.use_dynamic_bsz, data.max_token_len_per_gpu, 1)
        return ModelPart(engine, infer_limits=limits)

    def _sums(self, reference: ModelPart, batch: DataProto) -> Tensor:
        return answer_sums(reference.infer(batch, ("log_probs",))["log_probs"], batch.tensors["response_mask"])

    def _precompute(self, reference: ModelPart) -> None:
        """Every pair's sums (rows, 2), kept beside the checkpoints: a resumed run cannot compute them any more.

        The reference is given up afterwards. Beside an adapter it costs nothing, and the pass is still saved.
        """
        file = Path(self.config.trainer.default_local_dir) / STORED
        known = self.ctx.only_main(lambda: read_tensors(file) if file.is_file() else {}) or {}
        (there,) = self.ctx.sum(float(bool(known)))
        loaders = {"train": self.train_loader, "val": self.val_loader}
        sizes = {name: len(loader.dataset.dataframe) for name, loader in loaders.items() if loader is not None}
        if there:
            self.stored = {name: self._everywhere(known.get(name), size, name) for name, size in sizes.items()}
        else:
            found = {name: self._pass_over(reference, loader.dataset) for name, loader in loaders.items() if loader}
            self.ctx.only_main(lambda: _write(file, found))
            self.stored = found
        self.reference = None

    def _pass_over(self, reference: ModelPart, dataset: Any) -> Tensor:
        sums = torch.zeros(len(dataset.dataframe), 2)
        size = self.config.data.train_batch_size
        for first in range(0, len(dataset), size):
            rows = dataset.collate([dataset[i] for i in range(first, min(first + size, len(dataset)))])
            batch = self._share(self.make_batch(rows))
            if len(batch):
                found = self._sums(reference, batch).view(-1, 2)
                sums[batch.tensors[INDEX][0::2]] = found
            else:
                self._sums(reference, batch)
        return self._total(sums)

    def _everywhere(self, known: Tensor | None, size: int, name: str) -> Tensor:
        """Rank 0's tensor on every rank."""
        if known is not None and len(known) != size:
            raise CheckpointError(
                f"the stored log-probs of the reference are those of other {name} data",
                got=f"{len(known)} rows",
                allowed=f"{size} rows",
                fix=f"Delete {STORED} in trainer.default_local_dir, or take another folder.",
            )
        return self._total(torch.zeros(size, 2) if known is None else known)

    def _total(self, sums: Tensor) -> Tensor:
        if self.ctx.world_size == 1:
            return sums
        return torch.tensor(self.ctx.sum(*sums.flatten().tolist())).view(-1, 2)


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(file, tensors)

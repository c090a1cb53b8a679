"""Supervised training on pairs of answers: what DPO and reward models change of the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from verl.algorithms.aggregation import LossNorm
from verl.algorithms.preference import KL_POINT, LABEL, MARGIN, REFERENCE_SUMS, DPOLoss, answer_sums
from verl.checkpoint.tensors import read_tensors, write_tensors
from verl.config import DPOTrainerConfig, replace
from verl.errors import CheckpointError
from verl.metrics import MetricSet
from verl.models.lora import LoraSettings
from verl.protocol import DataProto
from verl.trainer.supervised import SupervisedTrainer, images_of
from verl.workers.part import ModelPart, base_of, local_model
from verl.workers.reward_model import with_end_column

INDEX = "index"
STORED = "ref_sums.safetensors"


class PairTrainer(SupervisedTrainer):
    """Rows come in pairs (chosen, rejected); validation reports the loss and its metrics over all pairs."""

    together = 2
    validates = ()

    def make_batch(self, rows: dict[str, Any]) -> DataProto:
        batch = self.arrange(split_at_answers(rows))
        for name in (MARGIN, LABEL, INDEX):
            if name in rows:
                cast(Any, batch.batch)[name] = rows[name]
        return batch

    def arrange(self, batch: DataProto) -> DataProto:
        """The answers as the model sees them."""
        return batch

    def validate(self) -> dict[str, float]:
        """``val/loss`` and ``val/<metric of the loss>``: means over the judged answers of the validation rows."""
        assert self.val_loader is not None, "there is nothing to validate on"
        measured, total, count = MetricSet(), 0.0, 0
        for rows in self.val_loader:
            batch = self.complete(self._share(self.make_batch(rows)), "val")
            outputs = self.part.infer(batch, self.loss_fn.outputs)  # also without rows: the other ranks wait for it
            if not len(batch):
                continue
            tokens = float(batch.tensors["response_mask"].sum())
            norm = LossNorm(dp_size=1, num_tokens=tokens, num_sequences=len(batch))
            loss, metrics = self.loss_fn(outputs, batch.tensors, norm)
            measured.merge(metrics)
            total, count = total + len(batch) * loss.item(), count + len(batch)
        loss_sum, everyone = self.ctx.sum(total, count)
        facts: Any = [[name, metric.value, metric.weight] for name, metric in measured.items()]
        everywhere = MetricSet()
        for name, value, weight in (fact for rank in self.ctx.exchange(facts) for fact in rank):
            everywhere.add(name, value, "mean", weight)
        means = {"loss": loss_sum / max(everyone, 1), **everywhere.values()}
        return {f"val/{name}": value for name, value in means.items()}


class RMTrainer(PairTrainer):
    """A scalar head on the last token of each answer."""

    kind = "value"

    def arrange(self, batch: DataProto) -> DataProto:
        return with_end_column(batch)


class DPOTrainer(PairTrainer):
    """Adds the reference policy's log-probabilities of every answer to the rows of a step."""

    def __init__(self, config: DPOTrainerConfig, *arguments: Any, **named: Any):
        super().__init__(config, *arguments, **named)
        self.dpo = config.dpo
        self.stored: dict[str, Tensor] | None = None
        self.reference: ModelPart | None = None
        if not (cast(DPOLoss, self.loss_fn).reference_free or self.dpo.precompute_ref_log_probs):
            self.reference = self._make_reference()

    def complete(self, batch: DataProto, split: str = "train") -> DataProto:
        tensors = cast(Any, batch.batch)
        if self.reference is not None:
            tensors[REFERENCE_SUMS] = self._sums(self.reference, batch)
        elif self.stored is not None and len(batch):
            tensors[REFERENCE_SUMS] = self.stored[split][tensors[INDEX], torch.arange(len(batch)) % 2]
        return batch

    def fit(self) -> None:
        if self.dpo.precompute_ref_log_probs:
            self.stored = self._precomputed()
        super().fit()

    def _make_reference(self) -> ModelPart:
        model, ref_path = self.config.model, self.dpo.ref_model_path
        if LoraSettings.of(model) is not None and ref_path is None:
            return ModelPart(base_of(self.engine), infer_limits=self.limits)
        model = replace(model, path=ref_path or model.path, lora_rank=0, lora_adapter_path=None)
        if ref_path is not None:
            model = replace(model, lora_base_quantization=None)  # only the policy has a base in 4 bits
        key = "model.path" if ref_path is None else "dpo.ref_model_path"
        return ModelPart(self.make_engine(local_model(model, key)), infer_limits=self.limits)

    def _sums(self, reference: ModelPart, batch: DataProto) -> Tensor:
        return answer_sums(reference.infer(batch, ("log_probs",))["log_probs"], batch.tensors["response_mask"])

    def _precomputed(self) -> dict[str, Tensor]:
        """Every pair's sums (rows, 2), kept next to the checkpoints: a resumed run can no longer compute them."""
        file = Path(self.config.trainer.default_local_dir) / STORED
        loaders = {"train": self.train_loader, "val": self.val_loader}
        data = {name: loader.dataset for name, loader in loaders.items() if loader is not None}
        stored = self.ctx.only_main(lambda: read_tensors(file) if file.is_file() else {}) or {}
        (there,) = self.ctx.sum(float(bool(stored)))
        if there:
            return {name: self._everywhere(stored.get(name), len(rows.dataframe), name) for name, rows in data.items()}
        reference = self._make_reference()  # freed afterwards
        log_probs = {name: self._pass_over(reference, rows) for name, rows in data.items()}
        self.ctx.only_main(lambda: _write(file, log_probs))
        return log_probs

    def _pass_over(self, reference: ModelPart, dataset: Any) -> Tensor:
        sums = torch.zeros(len(dataset.dataframe), 2)
        size = self.config.data.train_batch_size
        for first in range(0, len(dataset), size):
            rows = dataset.collate([dataset[i] for i in range(first, min(first + size, len(dataset)))])
            batch = self._share(self.make_batch(rows))
            sums[batch.tensors[INDEX][0::2]] = self._sums(reference, batch).view(-1, 2)
        return self._total(sums)

    def _everywhere(self, sums: Tensor | None, size: int, name: str) -> Tensor:
        """Rank 0's tensor on every rank."""
        if sums is not None and len(sums) != size:
            raise CheckpointError(
                f"the stored log-probs of the reference are those of other {name} data",
                got=f"{len(sums)} rows",
                allowed=f"{size} rows",
                fix=f"Delete {STORED} in trainer.default_local_dir, or take another folder.",
            )
        return self._total(torch.zeros(size, 2) if sums is None else sums)

    def _total(self, sums: Tensor) -> Tensor:
        if self.ctx.world_size == 1:
            return sums
        return torch.tensor(self.ctx.sum(*sums.flatten().tolist())).view(-1, 2)


class KTOTrainer(DPOTrainer):
    """Rows come with the mismatched ones behind them, which give the reference point and are not trained on."""

    def complete(self, batch: DataProto, split: str = "train") -> DataProto:
        """Adds the reference's log-probs and KTO's point z = max(0, mean of log pi - log ref over mismatched rows).

        The mean is over the rows of all ranks, before the optimizer step. Without gradient, as in the paper.
        """
        assert self.reference is not None, "KTO has a reference policy"
        reference = self._sums(self.reference, batch)
        mismatched = batch[list(range(1, len(batch), 2))]
        gap = self._sums(self.part, mismatched) - reference[1::2]
        total, count = self.ctx.sum(float(gap.double().sum()), len(mismatched))
        rows = batch[list(range(0, len(batch), 2))]
        tensors = cast(Any, rows.batch)
        tensors[REFERENCE_SUMS] = reference[0::2]
        tensors[KL_POINT] = torch.full((len(rows),), max(0.0, total / max(count, 1)))
        return rows


def split_at_answers(rows: dict[str, Any]) -> DataProto:
    """Rows (B, L) of pairs, padded on the right, as prompts and responses: a pair's rows have their prompt in common.

    The common prefix of a pair's rows, up to the first token of an answer, is padded on the left to (B, P); the rest
    on the right to (B, T). The tokens, and which of them are trained, stay as they are.
    """
    ids, there, trained = (rows[name] for name in ("input_ids", "attention_mask", "loss_mask"))
    common = shared_lengths(ids, trained)
    lengths = there.sum(-1)
    left, right = int(common.max()), max(1, int((lengths - common).max()))
    columns = torch.arange(left + right)[None] - (left - common)[:, None]  # of each place, the column it comes from
    attended = (columns >= 0) & (columns < lengths[:, None])
    source = columns.clamp(0, ids.shape[1] - 1)
    both_sides = {
        name: torch.where(attended, values.gather(1, source), 0) for name, values in (("ids", ids), ("on", trained))
    }
    attention = attended.to(there.dtype)
    return DataProto.from_dict(
        tensors={
            "input_ids": both_sides["ids"],
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": both_sides["ids"][:, left:],
            "response_mask": both_sides["on"][:, left:],
        },
        non_tensors=images_of(rows),
    )


def shared_lengths(ids: Tensor, trained: Tensor) -> Tensor:
    """(B,) how many tokens a row has in common with the other one of its pair, in front of either's answer."""
    chosen, rejected = ids[0::2], ids[1::2]
    differs = (chosen != rejected) | trained[0::2].bool() | trained[1::2].bool()
    width = ids.shape[1]
    places = torch.where(differs, torch.arange(width), width)
    return places.min(-1).values.repeat_interleave(2)


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(file, tensors)

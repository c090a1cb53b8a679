"""Supervised training with a teacher: its logits are computed inside the student's passes and never leave them."""

from __future__ import annotations

from functools import partial

from verl.algorithms.distillation import logits_divergence
from verl.config import SFTTrainerConfig
from verl.config.schema.sft import teacher_of_files
from verl.trainer.models import teacher_model
from verl.trainer.supervised import SupervisedTrainer
from verl.workers.part import ModelPart, local_model


class DistilledTrainer(SupervisedTrainer):
    """Loads the frozen teacher on the student's ranks, in the student's layout; `DistilledSFTLoss` is the loss."""

    config: SFTTrainerConfig

    def _make_part(self) -> ModelPart:
        part, loss = super()._make_part(), self.config.distillation.distillation_loss
        key, path = teacher_of_files(self.config.distillation)
        teacher = self.make_engine(local_model(teacher_model(self.config.model, path), key))
        measure = partial(
            logits_divergence, kind=loss.loss_mode, topk=loss.topk, beta=loss.beta, temperature=loss.temperature
        )
        part.engine.compare_with(teacher, measure)
        return part

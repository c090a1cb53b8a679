"""``python -m verl.trainer.dpo_trainer key=value ...``: direct preference optimisation on pairs of answers.

On several processes: ``torchrun --nproc_per_node=N -m verl.trainer.dpo_trainer key=value ...``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from verl.config import DPOTrainerConfig
from verl.data.look import look_at_pairs
from verl.trainer import launch

if TYPE_CHECKING:
    from verl.protocol.tokenizer import Tokenizer
    from verl.single_controller.spmd import Spmd
    from verl.trainer.pairs import DPOTrainer


def build_dpo(config: DPOTrainerConfig, tokenizer: Tokenizer, ctx: Spmd) -> DPOTrainer:
    """The trainer of a checked configuration."""
    from verl.algorithms.preference import DPOLoss
    from verl.data import create_preference_datasets, processor_of
    from verl.trainer.pairs import DPOTrainer

    dpo = config.dpo
    processor = processor_of(config.model, tokenizer, config.data.mm_processor_kwargs)
    train, val = create_preference_datasets(config.data, tokenizer, processor)
    loss = DPOLoss(
        dpo.beta,
        dpo.loss_type,
        dpo.label_smoothing,
        dpo.length_normalised,
        dpo.reference_free,
        dpo.simpo_gamma,
        dpo.sft_coef,
    )
    return DPOTrainer(config, tokenizer, train, val, train.collate, loss, ctx)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    return launch.main("dpo_trainer", build_dpo, look_at_pairs, argv)


if __name__ == "__main__":
    sys.exit(main())

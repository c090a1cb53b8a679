"""``python -m verl.trainer.rm_trainer key=value ...``: a reward model from pairs of answers (Bradley-Terry).

On several processes: ``torchrun --nproc_per_node=N -m verl.trainer.rm_trainer key=value ...``. The folder it writes
is a token-classification checkpoint with one label: what reads a reward model or a value function reads it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from verl.config import RMTrainerConfig
from verl.data.look import look_at_pairs
from verl.trainer import launch

if TYPE_CHECKING:
    from verl.protocol.tokenizer import Tokenizer
    from verl.single_controller.spmd import Spmd
    from verl.trainer.pairs import RMTrainer


def build_rm(config: RMTrainerConfig, tokenizer: Tokenizer, ctx: Spmd) -> RMTrainer:
    """The trainer of a checked configuration."""
    from verl.algorithms.preference import RewardModelLoss
    from verl.data import create_preference_datasets, processor_of
    from verl.trainer.pairs import RMTrainer

    processor = processor_of(config.model, tokenizer, config.data.mm_processor_kwargs)
    train, val = create_preference_datasets(config.data, tokenizer, processor)
    return RMTrainer(config, tokenizer, train, val, train.collate, RewardModelLoss(config.rm.centering), ctx)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    return launch.main("rm_trainer", build_rm, look_at_pairs, argv)


if __name__ == "__main__":
    sys.exit(main())

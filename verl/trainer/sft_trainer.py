"""``python -m verl.trainer.sft_trainer key=value ...``: fine-tuning on chat data, loss on assistant tokens.

On several processes: ``torchrun --nproc_per_node=N -m verl.trainer.sft_trainer key=value ...``.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from verl.config import SFTTrainerConfig
from verl.data.look import look_at_conversations
from verl.trainer import launch

if TYPE_CHECKING:
    from verl.distributed import Ranks
    from verl.protocol.tokenizer import Tokenizer
    from verl.single_controller.spmd import Spmd
    from verl.trainer.supervised import SupervisedTrainer


def build_sft(config: SFTTrainerConfig, tokenizer: Tokenizer, ctx: Spmd) -> SupervisedTrainer:
    """The trainer of a checked configuration."""
    from verl.algorithms.distillation import DistilledSFTLoss
    from verl.algorithms.losses import SFTLoss
    from verl.data import create_sft_dataset, processor_of, sft_collate
    from verl.trainer.distilled import DistilledTrainer
    from verl.trainer.supervised import SupervisedTrainer

    data = config.data
    processor = processor_of(config.model, tokenizer, data.mm_processor_kwargs)
    train = create_sft_dataset(data.train_files, data, tokenizer, processor, max_samples=data.train_max_samples)
    val = None
    if data.val_files:
        val = create_sft_dataset(data.val_files, data, tokenizer, processor, max_samples=data.val_max_samples)
    collate = partial(sft_collate, pad_token_id=tokenizer.pad_token_id)
    if config.distillation.enabled:
        loss = DistilledSFTLoss(config.distillation.distillation_loss.alpha)
        return DistilledTrainer(config, tokenizer, train, val, collate, loss, ctx)
    return SupervisedTrainer(config, tokenizer, train, val, collate, SFTLoss(), ctx)


def run_sft(config: SFTTrainerConfig, ranks: Ranks | None = None) -> None:
    """Run a checked configuration; see `launch.run_checked`."""
    launch.run_checked(config, build_sft, ranks)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    return launch.main("sft_trainer", build_sft, look_at_conversations, argv)


if __name__ == "__main__":
    sys.exit(main())

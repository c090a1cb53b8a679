"""``python -m verl.trainer.sft_trainer key=value ...``: fine-tuning on chat data, loss on assistant tokens."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import cast

from verl.config import SFTTrainerConfig, load_config, save_config
from verl.errors import VerlError


def run_sft(config: SFTTrainerConfig) -> None:
    """Run a checked configuration."""
    from verl.algorithms.losses import SFTLoss
    from verl.data import create_sft_dataset, hf_tokenizer, sft_collate
    from verl.trainer import runtime
    from verl.trainer.supervised import SupervisedTrainer

    trainer, model, data = config.trainer, config.model, config.data
    runtime.start(trainer.seed, num_processes=trainer.nnodes * (trainer.n_gpus_per_node or 1))
    save_config(config, Path(trainer.default_local_dir) / "config.yaml")
    tokenizer = hf_tokenizer(
        model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )
    train = create_sft_dataset(data.train_files, data, tokenizer, max_samples=data.train_max_samples)
    val = None
    if data.val_files:
        val = create_sft_dataset(data.val_files, data, tokenizer, max_samples=data.val_max_samples)
    SupervisedTrainer(
        config, tokenizer, train, val, partial(sft_collate, pad_token_id=tokenizer.pad_token_id), SFTLoss()
    ).fit()


def main(argv: list[str] | None = None) -> int:
    """Command line; an error that is the user's to mend is one message and exit status 2."""
    try:
        config = load_config("sft_trainer", sys.argv[1:] if argv is None else argv)
        run_sft(cast(SFTTrainerConfig, config))
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

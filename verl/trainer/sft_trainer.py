"""``python -m verl.trainer.sft_trainer key=value ...``: fine-tuning on chat data, loss on assistant tokens.

On several processes: ``torchrun --nproc_per_node=N -m verl.trainer.sft_trainer key=value ...``.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from verl import env
from verl.config import SFTTrainerConfig, load_config, save_config
from verl.errors import VerlError, WorkerError

if TYPE_CHECKING:
    from verl.distributed import Ranks
    from verl.single_controller.spmd import Spmd


def run_sft(config: SFTTrainerConfig, ranks: Ranks | None = None) -> None:
    """Run a checked configuration.

    Args:
        ranks: the processes of the run, of which this is one; None joins those that torchrun started, or is alone.
    """
    from verl.single_controller.spmd import Spmd
    from verl.trainer import runtime

    trainer = config.trainer
    runtime.start(trainer.seed)
    if ranks is not None:
        _fit(config, Spmd(ranks, trainer.seed))
        return
    from verl import device, distributed

    several = env.get_int("WORLD_SIZE", 1) > 1
    ranks = distributed.start(device=device.resolve_device(trainer.device)) if several else distributed.Ranks()
    _fit(config, Spmd(ranks, trainer.seed))
    if several:
        distributed.stop()  # not behind an error: leaving would wait for ranks that are gone


def _fit(config: SFTTrainerConfig, ctx: Spmd) -> None:
    from verl.algorithms.losses import SFTLoss
    from verl.data import create_sft_dataset, hf_tokenizer, sft_collate
    from verl.trainer.supervised import SupervisedTrainer

    model, data = config.model, config.data
    ctx.only_main(lambda: save_config(config, Path(config.trainer.default_local_dir) / "config.yaml"))
    tokenizer = hf_tokenizer(
        model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )
    train = create_sft_dataset(data.train_files, data, tokenizer, max_samples=data.train_max_samples)
    val = None
    if data.val_files:
        val = create_sft_dataset(data.val_files, data, tokenizer, max_samples=data.val_max_samples)
    collate = partial(sft_collate, pad_token_id=tokenizer.pad_token_id)
    SupervisedTrainer(config, tokenizer, train, val, collate, SFTLoss(), ctx).fit()


def main(argv: list[str] | None = None) -> int:
    """Command line; an error that is the user's to mend is one message and exit status 2."""
    rank = env.get_int("RANK", 0)
    if rank:
        logging.getLogger("verl").setLevel(logging.ERROR)  # what there is to tell about settings, rank 0 tells
    try:
        config = load_config("sft_trainer", sys.argv[1:] if argv is None else argv)
    except VerlError as error:
        return _failed(error, tell=rank == 0)  # the same on every rank
    try:
        run_sft(cast(SFTTrainerConfig, config))
    except WorkerError as error:
        return _failed(error, tell=rank == 0)  # of another rank
    except VerlError as error:
        return _failed(error, tell=True)
    return 0


def _failed(error: VerlError, tell: bool) -> int:
    if tell:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

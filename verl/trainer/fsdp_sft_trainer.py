"""``python -m verl.trainer.fsdp_sft_trainer``: the former name of `verl.trainer.sft_trainer`, with the same settings.

Its old keys (``model.partial_pretrain``, ``data.micro_batch_size``, ``optim.lr_scheduler``, ...) resolve in both.
"""

from __future__ import annotations

import sys

from verl.trainer.sft_trainer import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())

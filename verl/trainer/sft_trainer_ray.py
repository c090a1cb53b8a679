"""Upstream's name of supervised training that starts its own processes: torchrun starts them here, on one machine."""

import os
import sys

from verl import env
from verl.config.loading import read_config
from verl.errors import ConfigError, VerlError
from verl.trainer import sft_trainer
from verl.trainer.command import report


def main(argv: list[str] | None = None) -> int:
    """`verl.trainer.sft_trainer` with ``trainer.n_gpus_per_node`` processes; of one process this one."""
    words = sys.argv[1:] if argv is None else argv
    try:
        trainer = read_config("sft_trainer", words).trainer
        if trainer.nnodes > 1:
            fix = "Start torchrun on each machine, with -m verl.trainer.sft_trainer."
            message = "this program starts processes on one machine"
            raise ConfigError(message, key="trainer.nnodes", got=trainer.nnodes, fix=fix)
    except VerlError as error:
        return report(error)
    count = trainer.n_gpus_per_node or 1
    if count == 1 or env.get_int("WORLD_SIZE", 1) > 1:
        return sft_trainer.main(words)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "verl.trainer.sft_trainer", *words])


if __name__ == "__main__":
    sys.exit(main())

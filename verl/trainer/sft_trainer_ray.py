"""Upstream's name of supervised training that starts its own processes: torchrun starts them here, on one machine."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl import env
from verl.config.loading.configuration import read_config
from verl.errors import ConfigError, VerlError
from verl.metrics import reset_notices
from verl.trainer import sft_trainer
from verl.trainer.command import report_error

SIZES = ("trainer.nnodes=", "trainer.n_gpus_per_node=")


def main(argv: list[str] | None = None) -> int:
    """`verl.trainer.sft_trainer` with ``trainer.n_gpus_per_node`` processes; of one process this one."""
    words = sys.argv[1:] if argv is None else argv
    if env.get_int("WORLD_SIZE", 1) > 1:
        return sft_trainer.main(words)  # torchrun has started this program itself, on however many machines
    try:
        trainer = _sizes(words)
        if trainer.nnodes > 1:
            fix = "Start torchrun on each machine, with -m verl.trainer.sft_trainer."
            message = "this program starts processes on one machine"
            raise ConfigError(message, key="trainer.nnodes", got=trainer.nnodes, fix=fix)
    except VerlError as error:
        return report_error(error)
    count = trainer.n_gpus_per_node or 1
    words = [word for word in words if not word.lstrip("+").startswith(SIZES)]  # they have had their effect
    if count == 1:
        return sft_trainer.main(words)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "verl.trainer.sft_trainer", *words])


def _sizes(words: list[str]) -> Any:
    """The section ``trainer``. Its notices are those of the program that runs it, which reads the words again."""
    with _quiet():
        trainer = read_config("sft_trainer", words).trainer
    reset_notices()
    return trainer


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("verl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


if __name__ == "__main__":
    sys.exit(main())

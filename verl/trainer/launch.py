"""How a program of supervised training starts: from its command line to a fitted trainer, alone or under torchrun."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl import env
from verl.config import load_config
from verl.config.loading.configuration import FirstLook
from verl.config.schema.sft import SupervisedConfig
from verl.errors import VerlError, WorkerError
from verl.trainer.command import interrupted, report_error

if TYPE_CHECKING:
    from verl.distributed import Ranks
    from verl.single_controller.spmd import Spmd
    from verl.trainer.supervised import SupervisedTrainer

UNTIL_TOLD = 10.0
"""Seconds that another rank leaves rank 0 to report an error that all have."""
Build = Callable[..., "SupervisedTrainer"]
"""``build(config, tokenizer, ctx)`` makes the trainer of a checked configuration."""


def run_checked(config: Any, build: Build, ranks: Ranks | None = None) -> None:
    """Run a checked configuration.

    Args:
        ranks: the processes of the run, of which this is one; None joins those that torchrun started, or is alone.
    """
    from verl import device, distributed
    from verl.config.machine.pools import refuse_without_cuda, role_of_supervised
    from verl.single_controller.spmd import Spmd
    from verl.trainer import runtime

    trainer = config.trainer
    runtime.prepare_process(trainer.seed, trainer.default_local_dir)
    on = device.resolve_device(trainer.device)
    refuse_without_cuda([role_of_supervised(config)], on, config.model.external_lib)
    if ranks is not None:
        _fit(config, build, Spmd(ranks, trainer.seed))
        return
    several = env.get_int("WORLD_SIZE", 1) > 1
    ranks = distributed.join_group(device=on) if several else distributed.Ranks()
    _fit(config, build, Spmd(ranks, trainer.seed))
    if several:
        distributed.leave_group()  # not after an error: leaving would wait for dead ranks


def _fit(config: SupervisedConfig, build: Build, ctx: Spmd) -> None:
    from verl.data import tokenizer_of
    from verl.trainer import runtime

    model = config.model
    ctx.only_main(lambda: runtime.check_run_folders(config))
    tokenizer = tokenizer_of(model)
    build(config, tokenizer, ctx).fit()


def main(program: str, build: Build, first_look: FirstLook, argv: list[str] | None = None) -> int:
    """Command line; a user's error is one message and exit status 2."""
    rank = env.get_int("RANK", 0)
    if rank:
        logging.getLogger("verl").setLevel(logging.ERROR)  # only rank 0 gives notices about settings
    try:
        config = load_config(program, sys.argv[1:] if argv is None else argv, first_look)
    except VerlError as error:
        return _failed(error, tell=rank == 0)  # the same on every rank
    try:
        run_checked(config, build)
    except WorkerError as error:
        return _failed(error, tell=rank == 0)  # of another rank
    except VerlError as error:
        return _failed(error, tell=True)
    except KeyboardInterrupt:
        return interrupted() if rank == 0 else 128 + signal.SIGINT
    return 0


def _failed(error: VerlError, tell: bool) -> int:
    if tell:
        return report_error(error)
    if env.get("TORCHELASTIC_RUN_ID"):
        time.sleep(UNTIL_TOLD)  # torchrun ends all ranks as soon as one has left: rank 0 has to say why first
    return 2

"""Logs of one rank and of the terminal, under upstream's path."""

import logging
from collections.abc import Mapping
from typing import Any

from verl import env
from verl.observability.backends.console import step_line


def log_with_rank(
    message: str, rank: int, logger: logging.Logger, level: int = logging.INFO, log_only_rank_0: bool = False
) -> None:
    """Log a message with its rank in front."""
    if rank == 0 or not log_only_rank_0:
        logger.log(level, f"[Rank {rank}] {message}")


def print_rank_0(message: object) -> None:
    """Print in the first process of a run alone."""
    if env.get_int("RANK", 0) == 0:
        print(message, flush=True)


class LocalLogger:
    """Prints a step's numbers as ``step:N - key:value - ...``."""

    def __init__(self, print_to_console: bool = True):
        self.print_to_console = print_to_console

    def flush(self) -> None:
        """Every line is out already."""

    def log(self, data: Mapping[str, Any], step: int) -> None:
        if self.print_to_console:
            print(step_line(dict(data), step), flush=True)

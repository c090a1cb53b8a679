"""ClearML. Its own settings apply (clearml.conf, CLEARML_*): CLEARML_OFFLINE_MODE=1 writes a session to the disk."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verl.observability.tracker import (
    COLUMNS,
    Sample,
    Tracker,
    open_picture,
    scalar_metrics,
    table_rows,
    tracker_package,
)

UNCONNECTED = (
    "catboost", "detect_repository", "fastai", "gradio", "hydra", "joblib", "lightgbm", "matplotlib", "megengine",
    "pytorch", "scikit", "tensorboard", "tensorflow", "tfdefines", "xgboost",
)  # fmt: skip
"""What ClearML would read or patch by itself; it takes no wildcard here, and a name that is absent counts as True."""


class ClearmlTracker(Tracker):
    """One ClearML task; ``critic/score/mean`` is the series ``score/mean`` of the plot ``critic``.

    Of the rest ClearML takes the names of script, host and user. Command line, output, repository, packages, use of
    the machine and what other libraries write are not taken, and random numbers stay as they are.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object] | None = None):
        super().__init__(project_name, experiment_name, config)
        with tracker_package("clearml", "pip install clearml"):
            import clearml
        clearml.Task._report_subprocess_enabled = False  # it would fork this process, with its threads
        clearml.Task.set_random_seed(None)  # init would seed python, numpy and torch
        with _undisturbed():
            self._task: Any = clearml.Task.init(
                project_name=project_name,
                task_name=experiment_name,
                reuse_last_task_id=False,
                auto_connect_arg_parser=False,
                auto_connect_frameworks=dict.fromkeys(UNCONNECTED, False),
                auto_resource_monitoring=False,
                auto_connect_streams=False,
            )
        self._logger = self._task.get_logger()
        if config:
            self._task.connect_configuration(dict(config), name="config")

    def log(self, data: Mapping[str, object], step: int) -> None:
        for key, value in scalar_metrics(data).items():
            plot, _, series = key.partition("/")
            self._logger.report_scalar(plot, series or plot, value, iteration=step)

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        rows = [[str(value) for value in row] for row in table_rows(samples, step)]
        self._logger.report_table(title, "samples", iteration=step, table_plot=[list(COLUMNS), *rows])
        for number, sample in enumerate(samples):
            if sample.picture is not None:
                picture = open_picture(sample.picture)
                self._logger.report_image(title, f"image {number}", iteration=step, image=picture)

    def finish(self, exit_code: int = 0) -> None:
        if exit_code:
            self._task.mark_failed(status_reason=f"the run ended with exit code {exit_code}")
        self._task.close()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals, and exceptions that nobody catches, are the run's to handle, also after the block, which draws from
    Python's random numbers in vain."""
    numbers = random.getstate()
    hook, handlers = sys.excepthook, {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        random.setstate(numbers)
        sys.excepthook = hook
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)

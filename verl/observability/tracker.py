"""The contract of one tracking backend, and the records it is given."""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import MissingDependencyError
from verl.metrics import as_float

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Sample:
    """One completion as a person wants to read it.

    Example:
        >>> Sample(prompt="12+30=", response="42", score=1.0, ground_truth="42")
    """

    prompt: str
    response: str
    score: float | None = None
    ground_truth: str | None = None
    question: str | None = None
    """The part of the prompt that a terminal has room for."""
    turns: Sequence[tuple[str, str]] = ()
    """Role and text of each piece of the response, where several speak; a terminal shows them instead of it."""
    picture: bytes | None = None
    """A small PNG file of the images that the model saw, side by side, for trackers that show images."""


class Tracker(ABC):
    """One place that metrics go to. A subclass under a dotted path works as a value of ``trainer.logger``.

    Args:
        project_name: groups runs (``trainer.project_name``).
        experiment_name: names this run (``trainer.experiment_name``).
        config: the resolved configuration as a plain nested dict, or None.
    """

    place: Path | None = None
    """The file or folder of this run alone, known once the run has begun; None where a tracker has none."""
    resume_name: str | None = None
    """By what a resumed run continues it, set by `start`; None: by the name of its place, if any."""
    before: str | None = None
    """That of the run that is resumed; set before `start`."""
    hides_secrets = False
    """It gets the configuration as it is, and leaves secrets out of what it stores by itself."""

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any] | None = None):
        self.project_name, self.experiment_name, self.config = project_name, experiment_name, config

    def start(self, total_steps: int, first_step: int = 0) -> None:  # noqa: B027 - most trackers need no total
        """The run will log ``total_steps`` steps and has done ``first_step`` of them (a resumed run)."""

    @abstractmethod
    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Store the metrics of one step."""

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:  # noqa: B027 - not every tracker can
        """Show a few completions."""

    def finish(self, exit_code: int = 0) -> None:  # noqa: B027 - nothing to close by default
        """Flush and close; called once."""

    def release(self) -> None:  # noqa: B027 - nothing to end by default
        """It failed and is off: end the threads and ports that it holds."""


class MetricNames:
    """Metric names as a tracker takes them; two names never become one.

    Args:
        plain: a name without the characters that the tracker refuses.
    """

    def __init__(self, plain: Callable[[str], str]) -> None:
        self._plain = plain
        self._names: dict[str, str] = {}

    def of(self, key: str) -> str:
        """The plain name, with ``_2`` and higher where an earlier metric has it."""
        if key not in self._names:
            name, number = self._plain(key), 2
            while name in self._names.values():
                name, number = f"{self._plain(key)}_{number}", number + 1
            self._names[key] = name
        return self._names[key]


@contextmanager
def tracker_boundary(
    switch_off: Callable[[BaseException], None], passes: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    """Whatever a tracker does within the block, the run continues: its error goes to ``switch_off``."""
    try:
        yield
    except passes:
        raise
    except (Exception, SystemExit) as error:  # boundary: a third-party tracker
        switch_off(error)


COLUMNS = ("step", "prompt", "response", "score", "ground_truth")
"""Of a table of samples."""


def table_rows(samples: Sequence[Sample], step: int) -> list[tuple[int, str, str, float | None, str | None]]:
    """The rows of such a table; half a letter, which UTF-8 does not have, is written out."""
    return [
        (step, _writable(s.prompt), _writable(s.response), s.score, s.ground_truth and _writable(s.ground_truth))
        for s in samples
    ]


def _writable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


@contextmanager
def tracker_package(tracker: str, install: str = "") -> Iterator[None]:
    """Within the block the package of a tracker is imported.

    Args:
        install: the sentence that says how; empty: by the extra of this library that is named as the tracker.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        yield
    except ImportError as error:
        command = install or f"In the checkout: pip install -e '.[{tracker}]'"
        raise MissingDependencyError(
            f"the package of the tracker {tracker} is not installed",
            key="trainer.logger",
            got=tracker,
            fix=f"{command}, or leave '{tracker}' out of trainer.logger.",
        ) from error


def open_picture(picture: bytes) -> Image.Image:
    """The PIL image in `Sample.picture`."""
    from PIL import Image

    return Image.open(io.BytesIO(picture))


def scalar_metrics(data: Mapping[str, Any]) -> dict[str, float | int]:
    """The scalar metrics of a step as Python numbers; text and lists are left out, booleans become 0 and 1."""
    values: dict[str, float | int] = {}
    for key, value in data.items():
        if isinstance(value, bool):
            values[key] = int(value)
        elif isinstance(value, (int, float)):
            values[key] = value
        elif not isinstance(value, (str, bytes, list, tuple, dict)) and value is not None and _is_scalar(value):
            values[key] = as_float(value)
    return values


def _is_scalar(value: Any) -> bool:
    """A numpy scalar or a tensor with one element (both have ``item`` and a size of one)."""
    shape = getattr(value, "shape", None)
    return shape is not None and math.prod(shape) == 1

"""Where a run's files are, which of them may be read, and whether the run is still running."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from verl.errors import DataError
from verl.journal.ending import NAME as END
from verl.journal.ending import is_alive, read_end
from verl.journal.places import HANG, LOCK, is_locked, newest_file
from verl.json_text import JsonObject, object_of
from verl.observability.backends.file import metrics_path

METRICS, CONFIG = "metrics.jsonl", "config.yaml"
SAMPLES = "rollout_data_dir"
MOST_VALUES = 100_000
"""Of a file of settings."""
MOST_STACKS = 500_000
"""Characters of stacks that are shown."""
STEP_FILE = re.compile(r"(\d+)\.(parquet|jsonl)")


@dataclass
class RunFolder:
    """The folder of a run (``trainer.default_local_dir``), maybe a copy of it, maybe from an earlier release.

    Args:
        path: of the folder.
        metrics, samples: its metrics file and its folder of samples, where these are outside of it.

    Attributes:
        notices: what could not be read, by place.

    Raises:
        DataError: one of them does not exist.
    """

    path: Path
    metrics: Path | None = None
    samples: Path | None = None
    notices: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path = self.path.resolve()
        if not self.path.is_dir():
            raise DataError(
                "there is no such folder of a run", got=str(self.path), fix="Name trainer.default_local_dir."
            )
        _check_named("--metrics", self.metrics, os.path.isfile, "file of metrics")
        _check_named("--samples", self.samples, os.path.isdir, "folder of samples")
        self.config: dict[str, object] = {}
        self._config_read: tuple[int, int] | None = None
        self.end: JsonObject = {}
        self.roots = [self.path, *(place.resolve() for place in (self.metrics, self.samples) if place is not None)]

    def allowed(self, place: Path) -> Path | None:
        """The file or folder behind a name; None, with a notice, where a link leads out of the run."""
        real = Path(os.path.realpath(place))  # unlike `Path.resolve`, it raises nothing for links in a circle
        if any(real.is_relative_to(root) for root in self.roots):
            return real
        self.notices[str(place)] = f"{place} leads out of the run's folder to {real}: it is not read"
        return None

    def metrics_file(self) -> Path | None:
        """The metrics of the run that began last; None: there are none yet."""
        if self.metrics is not None:
            return self.metrics.resolve()
        for place in (self.path / METRICS, self.path / f"{self.setting('experiment_name')}.jsonl"):
            newest = newest_file(place)
            if newest is not None and (real := self.allowed(newest)) is not None:
                return real
        outside = metrics_path(str(self.setting("project_name")), str(self.setting("experiment_name")))
        hint = f"; --metrics {outside} names one outside of it" if outside.is_file() else ""
        self.notices[METRICS] = f"no {METRICS} in {self.path}{hint}"
        return None

    def samples_folder(self) -> Path | None:
        """The folder with a file of samples per step; None: there is none."""
        if self.samples is not None:
            return self.samples.resolve()
        named = self.setting(SAMPLES)
        places = [Path(named), self.path / Path(named).name] if isinstance(named, str) and named else []
        for place in (*places, self.path / "samples"):
            newest = newest_file(place) if place.name else None
            if newest is not None and newest.is_dir() and newest.resolve().is_relative_to(self.path):
                return newest.resolve()
        if places:
            hint = f" --samples {places[0]} names them." if places[0].is_dir() else ""
            self.notices[SAMPLES] = f"trainer.{SAMPLES}={named} is not in the run's folder.{hint}"
        return None

    def stacks(self) -> str | None:
        """What the watchdog wrote at the last hang; None: there was none."""
        place = newest_file(self.path / HANG)
        real = None if place is None else self.allowed(place)
        if real is None or not os.path.isfile(real):
            return None
        try:
            with real.open(encoding="utf-8", errors="replace") as file:
                text, more = file.read(MOST_STACKS), file.read(1)
        except OSError as error:
            return f"{real} cannot be read: {error}"
        return f"{text}\n(cut: {real} has more)" if more else text

    def refresh(self) -> None:
        """Read the settings and the noted state again, where they changed."""
        fault = self.notices.pop(CONFIG, None)
        self.notices.clear()
        self.end = read_end(self.path) if self.allowed(self.path / END) else {}
        place = self.path / CONFIG
        real = self.allowed(place) if os.path.isfile(place) else None
        if real is None:
            self.config, self._config_read = {}, None
            return
        try:
            status = real.stat()
            seen = status.st_size, status.st_mtime_ns
            if seen != self._config_read:
                self._config_read, self.config = seen, {}
                values = yaml.safe_load(real.read_text(encoding="utf-8"))
                _check_size(values)
                self.config = flat(values)
            elif fault is not None:
                self.notices[CONFIG] = fault
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            self.notices[CONFIG] = f"{place} cannot be read: {error}"

    def setting(self, name: str) -> object:
        """A setting under ``trainer``; None where it is not known."""
        return self.config.get(f"trainer.{name}")

    @property
    def total_steps(self) -> int | None:
        """At which the run is complete; None: not known."""
        noted = self.end.get("total_steps", self.setting("total_training_steps"))
        return noted if isinstance(noted, int) else None

    def state(self, last_step: int | None) -> tuple[str, str | None]:
        """(``running``, ``complete``, ``stopped``, ``failed`` or ``unknown``; why).

        Args:
            last_step: that is logged; None: none.
        """
        lock = self.path / LOCK
        is_file = os.path.isfile(lock) and not os.path.islink(lock)
        if is_file and is_locked(lock):
            return "running", None
        noted = str(self.end.get("state"))
        if noted in ("complete", "stopped", "failed"):
            return noted, str(self.end.get("why") or "") or None
        if noted == "running":
            where = f"process {self.end.get('pid')} on {self.end.get('host')}"
            return self._of_process(is_alive(self.end), where)
        holder = self._holder(lock) if is_file else {}
        if holder:
            is_here = holder.get("host") == socket.gethostname()
            return self._of_process(False if is_here else None, f"process {holder.get('pid')} on {holder.get('host')}")
        total = self.total_steps
        if total is None or last_step is None:
            return "unknown", "a run of an earlier release, which does not say how it ended"
        return ("complete", None) if last_step >= total else ("stopped", f"it ended after step {last_step} of {total}")

    def _of_process(self, alive: bool | None, where: str) -> tuple[str, str | None]:
        if alive is None:
            return "unknown", f"it was started on another machine, or copied while it ran ({where})"
        return ("running", None) if alive else ("failed", f"its process ended without a word ({where})")

    def _holder(self, lock: Path) -> JsonObject:
        try:
            text = lock.read_text(encoding="utf-8", errors="replace")[:1000]
        except OSError:  # no lock: a copy, or an earlier release
            return {}
        holder = object_of(text) if text else {}
        return holder if isinstance(holder, dict) else {"pid": "?", "host": "?", "since": text}


def _check_named(flag: str, place: Path | None, exists: Callable[[Path], bool], kind: str) -> None:
    if place is not None and not exists(place):
        raise DataError(f"there is no such {kind}", key=flag, got=str(place), fix="Correct it, or leave it out.")


def _check_size(value: object) -> None:
    """Refuse values whose references to each other unfold to more than a person could read.

    Raises:
        ValueError: they do.
    """
    left, count = [value], 0
    while left:
        item = left.pop()
        count += 1
        if count > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values")
        left += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()


def flat(value: object, above: str = "") -> dict[str, object]:
    """Nested settings as one level of dotted names; a list is a value."""
    if not isinstance(value, dict) or not value:
        return {above: value} if above else {}
    made: dict[str, object] = {}
    for name, item in value.items():
        made |= flat(item, f"{above}.{name}" if above else str(name))
    return made


def setting_text(value: object) -> str:
    """A setting's value as text."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)

"""Several trackers at once, none of which can stop a run.

An unknown name or a package that is not installed is an error before training starts; whatever goes wrong later in one
tracker (network, full disk, a quota) is shown once, and that tracker is off from then on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from verl.config.loading.secrets import hide
from verl.errors import VerlError
from verl.metrics import notice
from verl.observability.tracker import Sample, Tracker, tracker_boundary
from verl.registry import TRACKERS

_current: weakref.ReferenceType[Tracking] | None = None


class Tracking:
    """Fan-out of metrics to the trackers named in ``trainer.logger``.

    Args:
        default_backend: one name or several, of `supported_backend`, or a dotted path ``my_pkg.my_mod:MyTracker`` (a
            subclass of `verl.observability.tracker.Tracker`).
        config: the resolved configuration as a plain dict, for trackers that store it; they get it without secrets.

    Raises:
        ConfigError: a name is unknown.
        MissingDependencyError: the package of a named tracker is not installed.

    Example:
        >>> with Tracking("demo", "first", ["console", "file"]) as tracking:
        ...     tracking.log({"critic/score/mean": 0.5}, step=1)
    """

    supported_backend = tuple(TRACKERS.names())

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Iterable[str] = "console",
        config: Mapping[str, Any] | None = None,
    ):
        global _current
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        self.logger: dict[str, Tracker] = {}
        for name in names:
            TRACKERS.check(name)
        for name in names:
            with tracker_boundary(partial(self._switch_off, name), passes=VerlError):
                tracker = TRACKERS.get(name)
                shown_config = config if getattr(tracker, "hides_secrets", False) or config is None else hide(config)
                self.logger[name] = tracker(project_name, experiment_name, shown_config)
        _current = weakref.ref(self)

    def start(self, total_steps: int, first_step: int = 0, before: Mapping[str, str] | None = None) -> dict[str, str]:
        """The run begins, or resumes behind ``first_step``; says where it is written.

        Args:
            before: what this returned in the run that is resumed.

        Returns:
            By what a resumed run continues each tracker: the name of its file or folder, or one in its store.
        """
        for name, tracker in self.logger.items():
            tracker.before = (before or {}).get(name)
        self._each(lambda tracker: tracker.start(total_steps, first_step))
        places = {name: tracker.place for name, tracker in self.logger.items() if tracker.place is not None}
        if places:
            shown = ", ".join(f"{place} ({name})" for name, place in places.items())
            notice("trainer.logger", f"the metrics of this run are in {shown}")
        names = {name: place.name for name, place in places.items()}
        return names | {name: one.resume_name for name, one in self.logger.items() if one.resume_name is not None}

    def log(self, data: Mapping[str, Any], step: int, backend: str | Sequence[str] | None = None) -> None:
        """Log one step to all trackers, or to those named in ``backend``."""
        self._each(lambda tracker: tracker.log(data, step), backend)

    def log_samples(
        self, title: str, samples: Sequence[Sample], step: int, backend: str | Sequence[str] | None = None
    ) -> None:
        """Show a few completions in every tracker that can show text."""
        self._each(lambda tracker: tracker.log_samples(title, samples, step), backend)

    def finish(self, exit_code: int = 0) -> None:
        """Close every tracker; a second call does nothing."""
        self._each(lambda tracker: tracker.finish(exit_code))
        self.logger.clear()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(0 if kind is None else 1)

    def _each(self, action: Callable[[Tracker], None], backend: str | Sequence[str] | None = None) -> None:
        backends = {backend} if isinstance(backend, str) else set(self.logger if backend is None else backend)
        for name, tracker in list(self.logger.items()):
            if name in backends:
                with tracker_boundary(partial(self._switch_off, name)):
                    action(tracker)

    def _switch_off(self, name: str, error: BaseException) -> None:
        tracker = self.logger.pop(name, None)
        notice(f"trainer.logger={name}", f"failed and is off from now on ({type(error).__name__}: {error})")
        if tracker is not None:
            with tracker_boundary(partial(self._switch_off, name)):
                tracker.release()


def current_tracking() -> Tracking | None:
    """The tracking that this process opened last, while it lives."""
    return _current() if _current is not None else None

"""The page of a run that is running: a process of its own, which ends with the run and cannot disturb it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from verl import env, lifeline
from verl.journal.places import private_opener
from verl.metrics import notice

KEY = "trainer.viewer"
LINK = "viewer_link.txt"
"""In the run's folder: the link, with its token. Trackers may store what a run prints."""
STDOUT, TERMINAL = 1, "/dev/tty"


class RunPage(lifeline.ChildProgram):
    """``python -m verl.viewer`` on one run; the console names the file with its link, and a failure is one notice.

    Args:
        folder: of the run.
        metrics, samples: its metrics file and its folder of samples, which may be outside of the folder.

    Raises:
        OSError: it cannot be started. RuntimeError: there is no further thread.
    """

    def __init__(self, folder: Path, metrics: Path | None = None, samples: Path | None = None):
        command = ["nice", "-n", "10", sys.executable, "-m", "verl.viewer", str(folder)]  # the run comes first
        for flag, place in (("--metrics", metrics), ("--samples", samples)):
            command += [] if place is None else [flag, str(place)]
        self._link = folder / LINK
        self._closing = threading.Event()
        super().__init__(lifeline.guarded(command), env.whole(), KEY)

    def on_line(self, line: str) -> None:
        if line.startswith("http://127.0.0.1:"):
            self._publish(line)
        else:
            super().on_line(line)

    def on_end(self, status: int) -> None:
        if not self._closing.is_set():
            notice(KEY, f"the page of this run ended with status {status}; the run continues. {self.output_tail}")

    def close(self) -> None:
        self._closing.set()
        super().close()
        with suppress(OSError):
            self._link.unlink()

    def _publish(self, link: str) -> None:
        try:
            self._link.unlink(missing_ok=True)
            with open(self._link, "x", encoding="utf-8", opener=private_opener) as file:
                file.write(f"{link}\n")
        except OSError as error:
            notice(KEY, f"the page of this run ends, because its link cannot be written: {error}")
            self.process.terminate()
        else:
            print(f"the page of this run: open the link in {self._link}", flush=True)
            show_at_terminal(link)


@contextmanager
def run_page(folder: Path, metrics: Path | None = None, samples: Path | None = None) -> Iterator[None]:
    """The page of a run for as long as the block lasts; one that cannot be started is a notice.

    Args:
        folder, metrics, samples: as of `RunPage`.

    Example:
        >>> with run_page(Path("checkpoints/sums"), Path("checkpoints/sums/metrics.jsonl")):
        ...     train()
    """
    try:
        page = RunPage(folder, metrics, samples)
    except (OSError, RuntimeError) as error:
        notice(KEY, f"the page of this run cannot be started: {error}")
        yield
        return
    with closing(page):
        yield


def show_at_terminal(link: str) -> None:
    """Write a link that can be clicked where this process prints to a terminal: no tracker or log reads it there."""
    if os.isatty(STDOUT):
        with suppress(OSError), open(TERMINAL, "w", encoding="utf-8") as terminal:  # none controls this process
            terminal.write(f"\033]8;;{link}\033\\{link}\033]8;;\033\\\n")

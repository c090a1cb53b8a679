"""The page of a run that is running: a process of its own, which ends with the run and cannot disturb it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from verl import env, lifeline
from verl.journal.places import private_opener
from verl.metrics import notice

KEY = "trainer.viewer"
END_SECONDS = 5.0
"""That the process gets to end."""
LINK = "viewer_link.txt"
"""In the run's folder: the link, with its token. Trackers may store what a run prints."""
SHOWN_LINES = 5
"""Of its output in a notice."""


class RunPage:
    """``python -m verl.viewer`` on one run; the console names the file with its link, and a failure is one notice.

    Args:
        folder: of the run.
        metrics, samples: its metrics file and its folder of samples, which may be outside of the folder.

    Example:
        >>> with RunPage(Path("checkpoints/sums"), Path("checkpoints/sums/metrics.jsonl")):
        ...     train()
    """

    def __init__(self, folder: Path, metrics: Path | None = None, samples: Path | None = None):
        self._command = [sys.executable, "-m", "verl.viewer", str(folder)]
        for flag, place in (("--metrics", metrics), ("--samples", samples)):
            self._command += [] if place is None else [flag, str(place)]
        self._link = folder / LINK
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._closing = threading.Event()

    def __enter__(self) -> RunPage:
        try:
            process = subprocess.Popen(
                lifeline.guarded(["nice", "-n", "10", *self._command]),  # the run comes first
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=env.whole(),
                start_new_session=True,  # an interrupt from the terminal is for the run, whose last step is still shown
            )
        except OSError as error:
            notice(KEY, f"the page of this run cannot be started: {error}")
            return self
        reader = threading.Thread(target=self._listen, args=(process,), name=KEY, daemon=True)
        try:
            reader.start()
        except RuntimeError as error:  # the limit of threads
            notice(KEY, f"the page of this run cannot be started: {error}")
            with process:
                _end(process)
            return self
        self._process, self._reader = process, reader
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._process is None or self._reader is None:
            return
        _end(self._process)
        self._reader.join(END_SECONDS)
        with suppress(OSError):
            self._link.unlink()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None, "a pipe"
        last = deque[str](maxlen=SHOWN_LINES)
        with process.stdout:
            for line in process.stdout:
                if line.startswith("http://127.0.0.1:"):
                    self._publish(line, process)
                else:
                    last.append(line.strip())
        status = process.wait()
        if not self._closing.is_set():
            notice(KEY, f"the page of this run ended with status {status}; the run continues. {' '.join(last)}")

    def _publish(self, link: str, process: subprocess.Popen[str]) -> None:
        try:
            self._link.unlink(missing_ok=True)
            with open(self._link, "x", encoding="utf-8", opener=private_opener) as file:
                file.write(link)
        except OSError as error:
            notice(KEY, f"the page of this run ends, because its link cannot be written: {error}")
            process.terminate()
        else:
            print(f"the page of this run: open the link in {self._link}", flush=True)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

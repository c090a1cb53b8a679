"""The page of a run that is running: a process of its own, which ends with the run and cannot disturb it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

from verl import env, lifeline
from verl.metrics import notice

KEY = "trainer.viewer"
END_SECONDS = 5.0
"""That the process gets to end."""
SHOWN_LINES = 5
"""Of its output in a notice."""


class RunPage:
    """``python -m verl.viewer`` on one run; the console shows its link once, and a failure is one notice.

    Args:
        folder: of the run.
        metrics, samples: its metrics file and its folder of samples, which may be outside of the folder; the samples
            may be written later.

    Example:
        >>> with RunPage(Path("checkpoints/sums"), Path("checkpoints/sums/metrics.jsonl")):
        ...     train()
    """

    def __init__(self, folder: Path, metrics: Path | None = None, samples: Path | None = None):
        self._command = [sys.executable, "-m", "verl.viewer", str(folder)]
        for flag, place in (("--metrics", metrics), ("--samples", samples)):
            self._command += [] if place is None else [flag, str(place)]
        self._samples = samples
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._closing = threading.Event()

    def __enter__(self) -> RunPage:
        try:
            if self._samples is not None:
                self._samples.mkdir(parents=True, exist_ok=True)
            self._process = subprocess.Popen(
                lifeline.guarded(self._command),
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
        self._reader = threading.Thread(target=self._listen, args=(self._process,), name=KEY, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._process is None or self._reader is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join(END_SECONDS)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None, "a pipe"
        last = deque[str](maxlen=SHOWN_LINES)
        with process.stdout:
            for line in process.stdout:
                if line.startswith("http://127.0.0.1:"):
                    print(f"the page of this run: {line}", end="", flush=True)
                else:
                    last.append(line.strip())
        status = process.wait()
        if not self._closing.is_set():
            notice(KEY, f"the page of this run ended with status {status}; the run continues. {' '.join(last)}")

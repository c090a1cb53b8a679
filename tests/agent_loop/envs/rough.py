"""An environment that exits, crashes, forks, never returns, or starts what outlives it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading

import numpy as np


class Rough:
    """The reward of the only step is 1; ``how`` says what happens before it returns.

    Args:
        how: what goes wrong.
        notes: a file for numbers of processes.
    """

    def __init__(self, how: str = "", notes: str = ""):
        self.how, self.notes = how, notes
        if how == "exit early":
            os._exit(4)

    def reset(self):
        return f"{random.random()} {np.random.rand()}", {}

    def step(self, action: str):
        if self.how == "exit":
            os._exit(3)
        if self.how == "crash":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.how == "raise":
            raise ValueError("the board is gone")
        if self.how == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
            open(self.notes, "w").close()
            threading.Event().wait()
        if self.how == "object":
            return object(), 1.0, True, False, {}
        if self.how == "digits":
            return 10**5000, 1.0, True, False, {}
        if self.how == "fork":
            os.fork()
        if self.how == "daemon":
            command = "import os, signal; os.setsid(); print(os.getpid(), flush=True); signal.pause()"
            with open(self.notes, "a") as notes:
                subprocess.Popen([sys.executable, "-c", command], stdout=notes).poll()
        return "", 1.0, True, False, {"unread": object()}

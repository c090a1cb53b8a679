"""Tasks in Harbor's format, in the sandbox, for `EnvironmentAgentLoop`: answers are scripts, tests give the reward.

There is no container: programs are those of this machine, there is no network, and no file of the task can be executed
by its name (``bash x.sh``, not ``./x.sh``). `harbor_files` refuses tasks that need more.
"""

from __future__ import annotations

import math
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from functools import cache

from verl.agent_loop.adapters.harbor_files import FOLDERS, read_task
from verl.json_text import read_json
from verl.sandbox import Limits, Outcome, Pool, Session
from verl.sandbox.session import LOST

HOW = "Each answer is run as a bash script in {}, and its output is shown; there are {}. Answer submit when done."
FENCED = re.compile(r"```(?:bash|sh|shell)?\n(.*?)```", re.DOTALL)
"""An answer's script: the first such block, else all of it."""
SUBMIT = "submit"
SPARE_SECONDS = 5.0
START = """
import base64, contextlib, io, json, os, signal, subprocess, sys, tarfile, tempfile
NAMES = dict(PATH={path!r}, PYTHONPATH=":".join(filter(None, sys.path)), HOME="/tmp", PWD={workdir!r}, LANG="C.UTF-8")
def unpack(packed):
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as files:
        files.extractall("/tmp", filter="tar")
def script(words, seconds, most):
    os.makedirs({workdir!r}, exist_ok=True)
    with tempfile.TemporaryFile() as output:
        code = subprocess.run(["timeout", "-k", "1", str(seconds), "bash", *words], cwd={workdir!r}, env=NAMES,
                              stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode
        output.seek(0)
        return code, output.read(most).decode("utf-8", "replace")
for folder in {folders!r}:
    os.makedirs("/tmp" + folder, exist_ok=True)
unpack({files!r})
"""
COMMAND = "print(json.dumps(script(['-c', {text!r}], {seconds!r}, {most!r})))"
SOLUTION = "unpack({files!r})\nscript(['/solution/solve.sh'], {seconds!r}, 1)"
TESTS = """
with contextlib.suppress(ProcessLookupError):
    os.kill(-1, signal.SIGKILL)
subprocess.run(["rm", "-rf", "/tmp/tests", "/tmp/logs"], env=NAMES, check=True)
os.makedirs("/tmp/logs/verifier")
unpack({files!r})
script(["/tests/test.sh"], {seconds!r}, 1)
written = [name for name in ("reward.json", "reward.txt") if os.path.exists("/logs/verifier/" + name)]
print(open("/logs/verifier/" + written[0]).read(10000))
"""
"""What still runs is ended first, and what the policy put in the place of the tests or the reward is removed."""
_LOCK = threading.Lock()  # threads of episodes: the first one with a task checks it


class HarborTask:
    """One attempt at a task.

    Args:
        path: folder of the task, relative to the one in which the run was started.
        max_commands: most scripts; after the last one the tests run as after ``submit``.
        command_seconds: limit of a script.
        most_shown: bytes of a script's output.

    Raises:
        NotBuiltError: the task needs a container.
        ConfigError: the folder holds no task.
    """

    def __init__(self, path: str, max_commands: int = 16, command_seconds: float = 30.0, most_shown: int = 4000):
        self._task, self._most, self._seconds, self._shown = read_task(path), max_commands, command_seconds, most_shown
        seconds = max(command_seconds, self._task.seconds) + SPARE_SECONDS
        limits = Limits(seconds, self._task.memory_mb, processes=64, open_files=512, disk_mb=256)
        self._session, self._has_files, self._count = Session(_pool(), limits), False, 0

    def reset(self) -> tuple[str, dict[str, object]]:
        """The instruction; a process checks a task before its first attempt.

        Raises:
            RuntimeError: the tests write no reward, or give the solution no more than an untouched folder.
        """
        with _LOCK:
            check_task(self._task.path)
        return f"{self._task.instruction}\n\n{HOW.format(self._task.workdir, self._most)}", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Run a script, and the tests after the last one or ``submit``. Without a reward, which `check_task` has seen
        the tests write, the attempt gets 0: it is the policy's doing."""
        self._count += 1
        if text.strip() == SUBMIT:
            return "", self.test() or 0.0, True, False, {}
        fenced, is_last = FENCED.search(text), self._count >= self._most
        output = self._run(fenced[1] if fenced else text)
        return output, (self.test() or 0.0) if is_last else 0.0, False, is_last, {}

    def solve(self) -> None:
        """Run the task's solution."""
        self._cell(SOLUTION.format(files=self._task.solution, seconds=self._task.seconds))

    def test(self) -> float | None:
        """The reward that the tests write; None where they write none."""
        outcome = self._cell(TESTS.format(files=self._task.tests, seconds=self._task.seconds))
        try:
            value = read_json(outcome.stdout) if outcome.ok else None
        except ValueError:
            return None
        value = value.get("reward") if isinstance(value, Mapping) else value
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def close(self) -> None:
        """End what runs."""
        self._session.close()

    def _run(self, text: str) -> str:
        """The output of a script and how it ended; one that a limit of the sandbox stops takes all files with it."""
        outcome = self._cell(COMMAND.format(text=text, seconds=self._seconds, most=self._shown))
        if outcome.ok:
            code, output = read_json(outcome.stdout)
            return f"{output}\n[exit code {code}]"
        begun_again = "" if self._has_files else "\n[all files are as they were at the beginning]"
        return outcome.describe()[-self._shown :] + begun_again

    def _cell(self, code: str) -> Outcome:
        if not self._has_files:
            task, path = self._task, f"{sys.base_prefix}/bin:/usr/bin:/bin"
            start = START.format(path=path, workdir=task.workdir, folders=FOLDERS, files=task.files)
            begun = self._session.run(start)
            if not begun.ok:
                raise RuntimeError(f"the sandbox does not take the files of {task.path}: {begun.describe()}")
        outcome = self._session.run(code)
        self._has_files = not outcome.detail.endswith(LOST)
        return outcome


@cache
def check_task(path: str) -> None:
    """Whether the tests give a reward in this sandbox, and more for the solution than for nothing.

    Raises:
        RuntimeError: they do not.
    """
    rewards, task = [], read_task(path)
    for is_solved in (False, True) if task.solution else (False,):
        with closing(HarborTask(path)) as attempt:
            if is_solved:
                attempt.solve()
            reward = attempt.test()
        if reward is None:
            raise RuntimeError(f"tests/test.sh of {path} writes no reward to /logs/verifier in this sandbox")
        rewards.append(reward)
    if task.solution and rewards[1] <= rewards[0]:
        what = f"its solution gets {rewards[1]:g}, an untouched folder {rewards[0]:g}"
        raise RuntimeError(f"{path} cannot be solved in this sandbox (no network, this machine's programs): {what}")


@cache
def _pool() -> Pool:
    return Pool(programs=("/bin", "/usr/bin", "/etc/alternatives"), folders=FOLDERS)

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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from verl.agent_loop.adapters.harbor_files import FOLDERS, KEY, read_task
from verl.errors import ConfigError
from verl.json_text import read_json
from verl.sandbox import Limits, Outcome, Pool, Session
from verl.sandbox.inside.root import TEMPORARY, place
from verl.sandbox.session import LOST

HOW = "Each answer is run as a bash script in {}, and its output is shown, for {} answers. Answer submit when done."
SCRIPT = re.compile(r"```(?:bash|sh|shell)?\n(.*?)```", re.DOTALL)
"""An answer's script: the first such block, else all of it."""
SUBMIT = "submit"
SPARE_SECONDS = 5.0
START = """
import base64, contextlib, io, json, os, signal, subprocess, sys, tarfile, tempfile
ROOT = {root!r}
NAMES = dict(PATH={path!r}, PYTHONPATH=":".join(filter(None, sys.path)), HOME=ROOT, PWD={workdir!r}, LANG="C.UTF-8")
def unpack(archive):
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(archive))) as files:
        files.extractall(ROOT, filter="tar")
def script(words, seconds, most):
    os.makedirs({workdir!r}, exist_ok=True)
    with tempfile.TemporaryFile() as output:
        code = subprocess.run(["timeout", "-k", "1", str(seconds), "bash", *words], cwd={workdir!r}, env=NAMES,
                              stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode
        output.seek(0)
        return code, output.read(most).decode("utf-8", "replace")
for folder in {folders!r}:
    os.makedirs(ROOT + folder, exist_ok=True)
unpack({files!r})
"""
COMMAND = "print(json.dumps(script(['-c', {text!r}], {seconds!r}, {most!r})))"
SOLUTION = "unpack({files!r})\nscript(['/solution/solve.sh'], {seconds!r}, 1)"
TESTS = """
def end_others():
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
end_others()
folders = {{name[1:] for name in {folders!r}}} - {{"tests", "logs"}}
others = [f"{{ROOT}}/{{name}}" for name in os.listdir(ROOT) if name not in folders]
subprocess.run(["rm", "-rf", *others], env=NAMES, check=True)
os.makedirs(ROOT + "/logs/verifier")
unpack({files!r})
NAMES.update(HOME=tempfile.mkdtemp(), PYTHONNOUSERSITE="1", PYTHONSAFEPATH="1",
             PYTHONPATH="/tests:" + NAMES["PYTHONPATH"])
script(["/tests/test.sh"], {seconds!r}, 1)
end_others()
names = [name for name in ("reward.json", "reward.txt") if os.path.exists("/logs/verifier/" + name)]
print(json.dumps([names, open("/logs/verifier/" + names[0]).read(10000)]))
"""
"""What still runs is ended first, and what the policy put in the place of the tests or the reward, or above them, where
pytest looks for its settings, is removed. Python then imports nothing from the policy's folders."""
_LOCKS: dict[str, threading.Lock] = {}  # by task; threads of episodes: the first one with a task checks it


class HarborTask:
    """One attempt at a task.

    Args:
        path: folder of the task, relative to the one in which the run was started.
        max_commands: most scripts; the answer after the last one counts as ``submit``.
        command_seconds: limit of a script.
        most_shown: bytes of a script's output.

    Raises:
        NotBuiltError: the task needs a container.
        ConfigError: the folder holds no task, or a limit is below 1.
    """

    bounds_its_steps = True
    """By the limits of the sandbox, for whose cores rows wait in line: no time limit of the loop may mask them."""

    def __init__(self, path: str, max_commands: int = 16, command_seconds: float = 30.0, most_shown: int = 4000):
        bounds = {"max_commands": max_commands, "command_seconds": command_seconds, "most_shown": most_shown}
        for name, value in bounds.items():
            if value < 1:
                raise ConfigError("must be at least 1", key=f"environment_kwargs.{name}", got=value)
        self._task = task = read_task(str(Path(path).resolve()))
        self._most, self._seconds, self._shown = max_commands, command_seconds, most_shown
        output_kb = 64 + 6 * most_shown // 1024  # a byte is up to six characters of JSON
        seconds = max(command_seconds, task.seconds) + SPARE_SECONDS
        limits = Limits(seconds, task.memory_mb, 64, open_files=512, disk_mb=task.disk_mb, output_kb=output_kb)
        self._session, self._has_files, self._count, self._least = Session(_pool(), limits), False, 0, 0.0
        self._reward_files: frozenset[tuple[str, ...]] = frozenset()
        self.written: tuple[str, ...] = ()

    def before_reset(self) -> None:
        """Check the task, which a process does once; no time limit of the loop holds here."""
        self._check()

    def reset(self) -> tuple[str, dict[str, object]]:
        """The instruction.

        Raises:
            RuntimeError: the tests write no reward, or give the solution no more than an untouched folder.
        """
        check = self._check()
        if check.fault:
            raise RuntimeError(check.fault)
        self._least, self._reward_files = min(0.0, check.untouched), check.reward_files
        return f"{self._task.instruction}\n\n{HOW.format(self._task.workdir, self._most)}", {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Run a script, or the tests after ``submit`` and after the last script. Without a reward, which `check_task`
        has seen the tests write, it is the policy's doing: the attempt gets 0, or less where an untouched folder does.
        """
        self._count += 1
        if text.strip() == SUBMIT or self._count > self._most:
            reward = self.test()
            return "", self._least if reward is None else reward, True, False, {}
        block = SCRIPT.search(text)
        return self._run(block[1] if block else text), 0.0, False, False, {}

    def solve(self) -> None:
        """Run the task's solution."""
        self._cell(SOLUTION.format(files=self._task.solution, seconds=self._task.seconds))

    def test(self) -> float | None:
        """The reward that the tests write; None where they write none, or a file that they do not write elsewhere."""
        code = TESTS.format(folders=FOLDERS, files=self._task.tests, seconds=self._task.seconds)
        outcome = self._cell(code)
        try:
            names, text = read_json(outcome.stdout) if outcome.ok else ((), "null")
            self.written = tuple(names)
            if self._reward_files and self.written not in self._reward_files:  # reward.json of the policy's program
                return None
            value = read_json(text)
            value = value.get("reward") if isinstance(value, Mapping) else value
            reward = float(value) if isinstance(value, int | float) else math.nan
        except (ValueError, OverflowError):  # no JSON, or an integer that no float holds
            return None
        return reward if math.isfinite(reward) else None

    def close(self) -> None:
        """End what runs."""
        self._session.close()

    def _check(self) -> TaskCheck:
        # Threads of rows that play this task take it in any order: the first one checks, the others read the cache.
        with _LOCKS.setdefault(self._task.path, threading.Lock()):
            return check_task(self._task.path)

    def _run(self, text: str) -> str:
        """The output of a script and how it ended; one that a limit of the sandbox stops takes all files with it."""
        outcome = self._cell(COMMAND.format(text=text, seconds=self._seconds, most=self._shown))
        if outcome.ok:
            code, output = read_json(outcome.stdout)
            return f"{output}\n[exit code {code}]"
        loss = "" if self._has_files else "\n[all files are as they were at the beginning]"
        return outcome.describe()[-self._shown :] + loss

    def _cell(self, code: str) -> Outcome:
        if not self._has_files:
            task, path = self._task, ":".join(map(place, _programs()))
            start = START.format(root=TEMPORARY, path=path, workdir=task.workdir, folders=FOLDERS, files=task.files)
            outcome = self._session.run(start)
            if not outcome.ok:
                what = f"its files do not fit into the sandbox (environment.storage_mb): {outcome.describe()}"
                raise ConfigError(what, key=KEY, got=task.path)
        outcome = self._session.run(code)
        self._has_files = not outcome.detail.endswith(LOST)
        return outcome


@dataclass(frozen=True)
class TaskCheck:
    """What is known of a task before an attempt.

    Args:
        untouched: the reward of an untouched folder.
        fault: why it cannot be played here; empty where it can.
        reward_files: the names that the tests write, for each of the two folders.
    """

    untouched: float = 0.0
    fault: str = ""
    reward_files: frozenset[tuple[str, ...]] = frozenset()


@cache
def check_task(path: str) -> TaskCheck:
    """Run the tests of a task on an untouched folder and, where it has a solution, on a solved one."""
    rewards: list[float] = []
    names: set[tuple[str, ...]] = set()
    for is_solved in (False, True) if read_task(path).solution else (False,):
        with closing(HarborTask(path)) as attempt:
            try:
                if is_solved:
                    attempt.solve()
                reward = attempt.test()
            except ConfigError as error:
                return TaskCheck(fault=str(error))
        if reward is None:
            return TaskCheck(fault=f"tests/test.sh of {path} writes no reward to /logs/verifier in this sandbox")
        rewards.append(reward)
        names.add(attempt.written)
    if rewards[-1] > rewards[0] or len(rewards) == 1:
        return TaskCheck(rewards[0], "", frozenset(names))
    what = f"its solution gets {rewards[1]:g}, an untouched folder {rewards[0]:g}"
    return TaskCheck(
        rewards[0], f"{path} cannot be solved in this sandbox (no network, this machine's programs): {what}"
    )


def _programs() -> tuple[str, ...]:
    return f"{sys.base_prefix}/bin", "/usr/bin", "/bin"


@cache
def _pool() -> Pool:
    return Pool(programs=(*_programs(), "/etc/alternatives"), folders=FOLDERS)

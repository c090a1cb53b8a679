"""Hostile answers run nothing and cost a second at most, all of them together, in every built-in scorer."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.hostile import answers
from verl.rewards.scorers import code, geo3k, gsm8k, math_boxed, math_dapo, numina, search_qa, symbolic
from verl.rewards.scorers.text import text_of
from verl.sandbox import Outcome

TELLING = (
    "exec",
    "compile",
    "import",
    "open",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
)
MOST_SECONDS = 1.0
MOST_MEMORY = 200 << 20


class Refuses:
    """Stands for a sandbox: it is shown the program and runs nothing."""

    def run(self, code, stdin, seconds):
        return Outcome("error")


TESTS = {"inputs": ["1"], "outputs": ["18"]}
SCORERS: dict[str, Callable[[str], Any]] = {
    "gsm8k": lambda text: gsm8k.compute_score(text, "18"),
    "gsm8k, flexible": lambda text: gsm8k.compute_score(text, "18", method="flexible"),
    "gsm8k, lenient": lambda text: gsm8k.compute_score(text, "18", method="flexible", lenient=True),
    "math": lambda text: math_boxed.compute_score(text, "18"),
    "dapo": lambda text: math_dapo.compute_score(text, "18")["acc"],
    "dapo, strict": lambda text: math_dapo.compute_score(text, "18", strict_box_verify=True)["acc"],
    "geo3k": lambda text: geo3k.compute_score(text, "18") > 0.5,
    "geo3k, formula": lambda text: geo3k.compute_score(text, r"\frac{\sqrt{x}}{18}") > 0.5,
    "search": lambda text: search_qa.compute_score(text, {"target": ["eighteen"]}),
    "search, part": lambda text: search_qa.compute_score_subem(text, {"target": ["eighteen"]}),
    "numina": lambda text: numina.compute_score(text, "18")["score"],
    "numina, formula": lambda text: numina.compute_score(text, r"\frac{\sqrt{x}}{18}")["score"],
    "formulas": lambda text: symbolic.equal(text, "18+x"),
    "code": lambda text: code.compute_score(text, TESTS, Refuses())["score"],
    "text": lambda text: text_of(text) == "18",
}
ORDINARY = (
    "#### 18",
    r"\boxed{18}",
    "Answer: 18",
    "<answer>eighteen</answer>",
    r"\boxed{\frac{\sqrt{x}}{18}}",
    "18+x",
    "17",
)
_seen: list[str] | None = None
_others: set[int | None] = set()
"""Threads that earlier tests have left behind."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event in TELLING and threading.get_ident() not in _others:
        _seen.append(f"{event} {arguments[:1]!r}"[:200])


sys.addaudithook(_watch)  # for the life of the process; it costs nothing while nobody listens


@contextmanager
def watched() -> Iterator[list[str]]:
    """What ran in this process meanwhile, in this thread, those of scorers and any that begins."""
    global _seen, _others
    mine = threading.current_thread()
    _others = {one.ident for one in threading.enumerate() if one is not mine and one.name != "verl-reward"}
    _seen = found = []
    try:
        yield found
    finally:
        _seen = None


def grader_seconds() -> float:
    """Processor time of the processes that compare formulas, and of this one."""
    return time.process_time() + sum(map(child_seconds, psutil.Process().children(recursive=True)))


def child_seconds(child: psutil.Process) -> float:
    try:
        return sum(child.cpu_times()[:2])
    except psutil.NoSuchProcess:  # of another test, say, and it ended just now
        return 0.0


def test_there_are_two_hundred_different_ones(tmp_path):
    assert len(list(answers(str(tmp_path / "canary")))) >= 200


@pytest.mark.parametrize("name", SCORERS)
def test_hostile_answers_run_nothing_and_cost_a_second_together(name, tmp_path):
    canary = tmp_path / "canary"
    texts = list(answers(str(canary)))
    score = SCORERS[name]
    score("18"), score(r"\boxed{(x+18)^2}"), symbolic.equal("x+x", "2x")  # modules and processes are there
    before, size = grader_seconds(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ordinary = [score(text) for text in ORDINARY]
    with watched() as seen:
        right = [text for text in texts if score(text) not in (0, 0.0, False)]
    spent = grader_seconds() - before
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size) << 10
    assert seen == []
    assert not canary.exists()
    assert spent < MOST_SECONDS, f"{spent:.2f} s"
    assert grown < MOST_MEMORY
    assert [score(text) for text in ORDINARY] == ordinary, "what came before changed the grader"
    assert all("18" in text or "⑱" in text for text in right), [text[:60] for text in right]


SAID = "\nif got < 0: raise PermissionError('not permitted')"
PAST_THE_HOOK = {
    "a program by the module below subprocess": """if True:
        import _posixsubprocess, os
        r, w = os.pipe()
        _posixsubprocess.fork_exec(
            [b'touch', b'CANARY'], [b'/usr/bin/touch', b'/bin/touch'], True, (w,), None, None,
            -1, -1, -1, -1, -1, -1, r, w, False, False, 0, None, None, None, -1, None, True)
        os.close(w)
        assert b'OSError' not in os.read(r, 100), 'not permitted'
        """,
    "a fork in C": "import ctypes; got = ctypes.pythonapi.fork(); got == 0 and ctypes.pythonapi._exit(0)" + SAID,
    "a file in C": "import ctypes; got = ctypes.pythonapi.creat(b'CANARY', 0o600)" + SAID,
    "a file opened in C": "import ctypes; got = ctypes.pythonapi.open(b'CANARY', 0o101, 0o600)" + SAID,
    "a command in C": "import ctypes; got = -ctypes.pythonapi.system(b'touch CANARY')" + SAID,
    "a connection in C": "import ctypes; got = ctypes.pythonapi.socket(2, 1, 0)" + SAID,
    "a signal in C": "import ctypes, os; got = ctypes.pythonapi.kill(os.getppid(), 0)" + SAID,
    "a file of the machine": "got = open('/etc/passwd').read()",
    "the environment of the run": "import os; got = open(f'/proc/{os.getppid()}/environ', 'rb').read()",
}


def test_a_grader_has_no_key_of_the_run_in_its_environment(tmp_path, monkeypatch):
    from verl.rewards.function import load_reward_function
    from verl.rewards.runners.process import ProcessRunner
    from verl.rewards.samples import RewardSample

    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-run")
    monkeypatch.setenv("MY_PASSWORD", "secret-of-the-run")
    file = tmp_path / "grader.py"
    file.write_text("import os\ndef compute_score(solution_str):\n    return float('secret' in str(os.environ))\n")
    runner = ProcessRunner(load_reward_function(str(file)), 60.0, 1, memory_mb=1024)
    (result,) = runner.submit([RewardSample(None, "", "")]).result(120)
    runner.close()
    assert result.score == 0.0


def test_a_grader_that_is_made_to_run_code_can_neither_start_nor_write_nor_connect(tmp_path):
    from verl.rewards.function import load_reward_function
    from verl.rewards.runners.process import ProcessRunner
    from verl.rewards.samples import RewardSample

    file = tmp_path / "grader.py"
    file.write_text("def compute_score(solution_str):\n    exec(solution_str)\n    return 1.0\n")
    runner = ProcessRunner(load_reward_function(str(file)), 60.0, 1, memory_mb=1024)
    canary = tmp_path / "canary"
    for text in (
        f"open({str(canary)!r}, 'w')",
        f"import os; os.system('touch {canary}')",
        f"import os; os.open({str(canary)!r}, os.O_CREAT | os.O_RDWR)",
        f"import subprocess; subprocess.run(['touch', {str(canary)!r}])",
        "import socket; socket.create_connection(('127.0.0.1', 1))",
        "import os; os.fork()",
    ):
        (result,) = runner.submit([RewardSample(None, text, "")]).result(120)
        assert result.failure is not None and "a grader may not do this" in result.failure.message, text
    for name, text in PAST_THE_HOOK.items():
        (result,) = runner.submit([RewardSample(None, text.replace("CANARY", str(canary)), "")]).result(120)
        assert result.failure is not None, f"{name} came through"
        assert "not permitted" in result.failure.message or "denied" in result.failure.message, (name, result.failure)
    (result,) = runner.submit([RewardSample(None, "x = bytearray(4 << 30)", "")]).result(120)
    assert result.failure is not None and "MemoryError" in result.failure.message
    runner.close()
    assert not Path(canary).exists()

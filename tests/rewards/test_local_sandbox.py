"""Programs of models in this machine's sandbox: scored by tests, stopped, and without a way to what is expected."""

from __future__ import annotations

import pytest

from verl.rewards import Limits, RewardFunction, RewardSample, Scorer, check_reward_data, default_compute_score
from verl.rewards.execution import Program
from verl.rewards.local_sandbox import LocalSandbox

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}


@pytest.fixture(scope="module")
def sandbox():
    made = LocalSandbox(256)
    made.check()
    return made


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print(sum(map(int, input().split())))", "finished"),
        ("def f(:", "not compiled"),
        ("exec('1 2')", "failed"),
        ("1 / 0", "failed"),
        ("while True: pass", "timeout"),
        ("x = bytearray(1 << 31)", "failed"),
        ("import socket; socket.create_connection(('127.0.0.1', 80))", "failed"),
        ("print('x' * (4 << 20))", "failed"),
    ],
)
def test_what_became_of_a_program_is_told(sandbox, code, status):
    assert sandbox.run(Program(code, "1 2", 2.0)).status == status


GOOD = "print(sum(map(int, input().split())))"
FORGED = """
import os, sys, gc, inspect
for name in ("/proc/self/environ", "/proc/1/cmdline", "/tmp/expected"):
    try:
        print(open(name).read())
    except OSError:
        pass
print("passed", "score", 1.0)
os._exit(0)
"""
ADD = "def add(a, b):\n    return a + b"
EXITS = "def add(a, b):\n    raise SystemExit(0)"
ANSWERS = [
    (GOOD, SUMS, 1.0),
    ("print(3)", SUMS, 0.5),
    (FORGED, SUMS, 0.0),
    (ADD, CALLS, 1.0),
    (FORGED, CALLS, 0.0),
    (EXITS, CALLS, 0.0),
    ("", CALLS, 0.0),
]


def test_answers_of_a_batch_are_scored_side_by_side(sandbox):
    scorer = Scorer(RewardFunction.of(default_compute_score, {"memory_limit_mb": 256}), Limits(timeout=25))
    results = scorer.score([RewardSample("apps", f"```python\n{code}\n```", tests) for code, tests, _ in ANSWERS])
    assert [result.score for result in results] == [score for *_, score in ANSWERS]
    scorer.close()


def test_a_run_with_programs_starts_the_sandbox_before_anything_else(sandbox, monkeypatch):
    checked = []
    monkeypatch.setattr(LocalSandbox, "check", lambda self: checked.append(self.memory_mb))
    check_reward_data({"reward": {"sandbox_fusion": {"memory_limit_mb": 77}}}, ["openai/gsm8k"])
    check_reward_data({"reward": {"sandbox_fusion": {"memory_limit_mb": 77}}}, ["openai/gsm8k", "taco"])
    assert checked == [77]

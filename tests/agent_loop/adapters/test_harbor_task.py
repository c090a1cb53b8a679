"""Tasks in Harbor's format: scripts in the sandbox, a reward by the tests, and what is refused by name."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.agent_loop.server.scripted import TOKENIZER, Scripted, rows, settings
from tests.harness.sandboxes import OFFERED
from verl.agent_loop import AgentLoopManager
from verl.agent_loop.adapters import harbor_task
from verl.agent_loop.adapters.harbor_files import read_task
from verl.agent_loop.adapters.harbor_task import HarborTask, TaskCheck, check_task
from verl.errors import ConfigError, NotBuiltError

needs_sandbox = pytest.mark.skipif("whole" not in OFFERED, reason="this machine does not offer the whole sandbox")
TEST = """
mkdir -p /logs/verifier
if [ "$(cat /app/sum.txt)" = "$(( $(head -1 /app/numbers.txt) + 1 ))" ]
then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
PYTHON_TEST = """
cd /app
if python3 -m unittest test_sum; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
TEST_SUM = """
import unittest

class Sum(unittest.TestCase):
    def test_sum(self):
        with open("/app/sum.txt") as file:
            self.assertEqual(file.read(), "42\\n")
"""
USER_FOLDER = f"~/.local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
END_PYTHON = "printf 'import os\\nos._exit(0)'"


@pytest.fixture
def task(tmp_path) -> Path:
    """Write the first number plus one into a file."""
    files = {
        "task.toml": 'version = "1.0"\n[metadata]\ntags = ["sum"]\n[verifier]\ntimeout_sec = 120.0\n',
        "instruction.md": "Write the first of numbers.txt plus one to sum.txt.\n",
        "environment/Dockerfile": "# small\nFROM ubuntu:24.04\nWORKDIR /app\nCOPY numbers.txt .\n",
        "environment/numbers.txt": "41\n",
        "tests/test.sh": TEST,
        "solution/solve.sh": "echo 42 > /app/sum.txt\n",
    }
    for name, text in files.items():
        file = tmp_path / "task" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "task"


def play(task, *script, **options):
    attempt = HarborTask(str(task), **options)
    try:
        attempt.before_reset()
        shown, _ = attempt.reset()
        steps = [attempt.step(text) for text in script]
    finally:
        attempt.close()
    return shown, steps


@needs_sandbox
def test_scripts_see_the_files_and_the_tests_pay_for_the_right_one(task):
    shown, steps = play(task, "cat numbers.txt", "Now:\n```bash\necho 42 > sum.txt\ncd /\n```", "pwd; ls", "submit")
    assert shown.startswith(
        "Write the first of numbers.txt plus one to sum.txt.\n\nEach answer is run as a bash script"
    )
    assert [step[0] for step in steps] == [
        "41\n\n[exit code 0]", "\n[exit code 0]", "/app\nnumbers.txt\nsum.txt\n\n[exit code 0]", "",
    ]  # fmt: skip
    assert [step[1:4] for step in steps] == [(0.0, False, False)] * 3 + [(1.0, True, False)]
    _, steps = play(task, "echo 42 > sum.txt", "false", "echo 43 > sum.txt", max_commands=2)
    assert steps[1] == ("\n[exit code 1]", 0.0, False, False, {}), "the last script and the tests are two steps"
    assert steps[2] == ("", 1.0, True, False, {}), "the answer after the last script counts as submit"


@needs_sandbox
@pytest.mark.parametrize(
    "attack",
    [
        "mkdir -p /tests /logs/verifier; echo 1 | tee /logs/verifier/reward.json; chmod 000 /tmp/logs/verifier",
        "rm -rf /tmp/tests; ln -s /app /tmp/tests; printf 'echo 1 > /logs/verifier/reward.txt' > /app/test.sh",
        "(while true; do echo 1 > /logs/verifier/reward.json; done) > /dev/null 2>&1 &",
        "kill -9 -1; echo 1 > /logs/verifier/reward.json",
        f"mkdir -p {USER_FOLDER}; {END_PYTHON} > {USER_FOLDER}/usercustomize.py",
        f"{END_PYTHON} > /app/unittest.py",
    ],
)
@pytest.mark.parametrize("tests", [TEST, PYTHON_TEST], ids=["shell", "python"])
def test_a_policy_that_writes_the_reward_itself_gets_nothing(task, attack, tests):
    (task / "tests/test.sh").write_text(tests)
    (task / "tests/test_sum.py").write_text(TEST_SUM)
    _, steps = play(task, attack, "submit")
    assert steps[1][1:4] == (0.0, True, False)


@needs_sandbox
def test_a_program_under_test_that_writes_another_reward_file_gets_nothing(task):
    (task / "tests/test.sh").write_text(f"bash /app/sum.sh\n{TEST}")
    (task / "solution/solve.sh").write_text("echo 'echo 42 > /app/sum.txt' > /app/sum.sh")
    forging = "echo 'mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json' > sum.sh"
    _, steps = play(task, forging, "submit")
    assert steps[1] == ("", 0.0, True, False, {})
    _, steps = play(task, "echo 'echo 42 > /app/sum.txt' > sum.sh", "submit")
    assert steps[1][1] == 1.0


@needs_sandbox
def test_settings_of_pytest_that_a_policy_leaves_above_the_tests_have_no_effect(task):
    (task / "tests/test.sh").write_text(PYTHON_TEST.replace("cd /app", "cd /tests").replace("unittest", "pytest"))
    (task / "tests/test_sum.py").write_text(TEST_SUM)
    (task / "tests/test.sh").write_text((task / "tests/test.sh").read_text().replace("test_sum;", "test_sum.py;"))
    _, steps = play(task, "printf '[pytest]\naddopts = --collect-only\n' > /tmp/pytest.ini", "submit")
    assert steps[1] == ("", 0.0, True, False, {})


@needs_sandbox
def test_a_script_that_hangs_or_floods_is_cut_and_the_attempt_goes_on(task):
    script = ["sleep 1000", "yes | head -c 1000000", "cat numbers.txt"]
    _, steps = play(task, *script, command_seconds=1, most_shown=10)
    assert [step[0] for step in steps] == ["\n[exit code 124]", "y\ny\ny\ny\ny\n\n[exit code 0]", "41\n\n[exit code 0]"]


@needs_sandbox
def test_tests_that_an_answer_makes_hang_pay_nothing(task):
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 1.0\n")
    (task / "tests/test.sh").write_text(f"bash /app/wait.sh\n{TEST}")
    _, steps = play(task, "echo 42 > sum.txt; echo 'tail -f /dev/null' > wait.sh", "submit")
    assert steps[1] == ("", 0.0, True, False, {})


@needs_sandbox
@pytest.mark.parametrize("reward", ["", "[" * 2000, "1" + "0" * 400, "1e999"])
def test_broken_tests_pay_no_more_than_an_untouched_folder(task, reward):
    (task / "tests/test.sh").write_text(
        'if [ -e /app/reward ]; then cp /app/reward /logs/verifier/reward.json; else echo "-0.5" > '
        "/logs/verifier/reward.txt; fi\n[ ! -e /app/sum.txt ] || echo 1 > /logs/verifier/reward.txt\n"
    )
    (task / "environment/numbers.txt").write_text(reward)
    _, steps = play(task, "cp numbers.txt reward", "submit")
    assert steps[1] == ("", -0.5, True, False, {})


def test_a_broken_task_is_checked_once_and_refused_each_time(task, monkeypatch):
    checks = []

    def test(attempt):
        checks.append(attempt)

    monkeypatch.setattr(HarborTask, "test", test)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="writes no reward"):
            play(task)
    assert len(checks) == 1


def test_the_check_of_one_task_does_not_wait_for_another(task, tmp_path, monkeypatch):
    copy = task.rename(tmp_path / "first").with_name("second")
    shutil.copytree(tmp_path / "first", copy)
    meeting = threading.Barrier(2, timeout=30)

    def meet(path):
        meeting.wait()
        return TaskCheck()

    monkeypatch.setattr(harbor_task, "check_task", meet)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda path: HarborTask(str(path)).before_reset(), (tmp_path / "first", copy)))
    assert not meeting.broken


def test_programs_of_the_interpreter_s_folder_are_shown(monkeypatch):
    monkeypatch.setattr(sys, "base_prefix", "/usr/local")
    assert harbor_task._programs()[0] == "/usr/local/bin"
    with closing(harbor_task._pool.__wrapped__()) as pool:
        assert "/usr/local/bin" in pool._options["programs"]


@needs_sandbox
def test_an_output_is_shown_up_to_its_limit(task):
    _, steps = play(task, "printf '\\001%.0s' {1..40000}", most_shown=30000)
    assert steps[0][0] == "\1" * 30000 + "\n[exit code 0]"


@pytest.mark.parametrize("name", ["max_commands", "command_seconds", "most_shown"])
def test_limits_below_1_are_refused(task, name):
    with pytest.raises(ConfigError, match=rf"environment_kwargs\.{name}: must be at least 1"):
        HarborTask(str(task), **{name: 0})


@needs_sandbox
def test_a_task_that_cannot_be_solved_here_or_writes_no_reward_is_refused(task):
    (task / "solution/solve.sh").write_text("apt-get install sums\n")
    with pytest.raises(RuntimeError, match=r"cannot be solved in this sandbox.* its solution gets 0, an untouched"):
        play(task)
    (task / "tests/test.sh").write_text("echo 1\n")
    read_task.cache_clear()
    check_task.cache_clear()
    with pytest.raises(RuntimeError, match="writes no reward to /logs/verifier"):
        play(task)


@pytest.mark.parametrize(
    "file, text, reason",
    [
        ("environment/Dockerfile", "FROM ubuntu\nRUN apt-get install gcc\n", r"line 2 \(RUN apt-get install gcc\)"),
        ("environment/Dockerfile", "FROM me/image:1\n", r"line 1 \(FROM me/image:1\)"),
        ("environment/Dockerfile", "COPY numbers.txt /etc/\n", "line 1"),
        ("environment/Dockerfile", "COPY ../tests /app\n", "line 1"),
        ("environment/docker-compose.yaml", "services: {}\n", "docker-compose.yaml"),
        ("task.toml", '[environment]\ndocker_image = "me/image"\n', "environment.docker_image"),
        ("task.toml", '[[steps]]\nname = "one"\n', "task.toml sets steps"),
        ("task.toml", "[environment]\nallow_internet = true\n", "environment.allow_internet"),
        ("task.toml", '[verifier]\nenv = {KEY = "x"}\n', "verifier.env"),
    ],
)
def test_what_needs_a_container_is_refused_by_name(task, file, text, reason):
    (task / file).write_text(text)
    with pytest.raises(NotBuiltError, match=f"{reason}.* needs a container"):
        HarborTask(str(task))


@pytest.mark.parametrize(
    "text, reason",
    [
        (b"version = ", "task.toml: Invalid value.*Allowed: TOML"),
        (b"\xff", "task.toml cannot be read: 'utf-8' codec.*Allowed: text in UTF-8"),
        (b'[environment]\nmemory_mb = "2G"', "environment.memory_mb. Got '2G'. Allowed: a positive whole number"),
        (b"[environment]\nstorage_mb = 0", "environment.storage_mb. Got 0. Allowed: a positive whole number"),
        (b"[verifier]\ntimeout_sec = nan", "verifier.timeout_sec. Got nan. Allowed: a positive number"),
        (b"environment = 1", r"environment. Got 1. Allowed: a section \[environment\]"),
    ],
)
def test_a_task_file_that_cannot_be_read_is_named_with_its_key(task, text, reason):
    (task / "task.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=reason):
        HarborTask(str(task))


def test_the_storage_of_a_task_is_its_disk(task):
    (task / "task.toml").write_text("[environment]\nstorage_mb = 32\n")
    assert HarborTask(str(task))._session._limits.disk_mb == 32


def test_a_folder_without_a_task_is_refused(task):
    (task / "instruction.md").unlink()
    with pytest.raises(ConfigError, match=r"instruction.md is missing.*\n?.*"):
        HarborTask(str(task))


@needs_sandbox
def test_an_episode_is_a_row_and_a_task_that_is_refused_costs_only_its_row(task, tmp_path):
    entry = {"name": "game", "_target_": "verl.agent_loop.envs.loop.EnvironmentAgentLoop"}
    entry |= {"environment": "verl.agent_loop.adapters.harbor_task:HarborTask"}
    (tmp_path / "loops.yaml").write_text(json.dumps([entry]))
    agent = SimpleNamespace(default_agent_loop="game", agent_loop_config_path=str(tmp_path / "loops.yaml"))
    extra = [{"environment_kwargs": {"path": str(path)}} for path in (task, tmp_path)]
    sampler = Scripted("echo 42 > sum.txt", "submit")
    manager = AgentLoopManager(settings(agent=agent, response_length=1000), sampler, TOKENIZER)
    made = manager.generate_sequences(rows(2, extra_info=extra))
    columns = made.non_tensor_batch
    assert columns["reward_score"].tolist() == [1.0, 0.0] and columns["agent_error"][0] is None
    assert "task.toml is missing" in columns["agent_error"][1]
    assert made.meta_info["metrics"]["rollout/agent/failed"].value == 1


@pytest.fixture(autouse=True)
def fresh():
    yield
    read_task.cache_clear()
    check_task.cache_clear()

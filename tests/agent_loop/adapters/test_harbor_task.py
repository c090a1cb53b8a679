"""Tasks in Harbor's format: scripts in the sandbox, a reward by the tests, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.agent_loop.server.scripted import TOKENIZER, Scripted, rows, settings
from tests.harness.sandboxes import OFFERED
from verl.agent_loop import AgentLoopManager
from verl.agent_loop.adapters.harbor_files import read_task
from verl.agent_loop.adapters.harbor_task import HarborTask, check_task
from verl.errors import ConfigError, NotBuiltError

needs_sandbox = pytest.mark.skipif("whole" not in OFFERED, reason="this machine does not offer the whole sandbox")
TEST = """
mkdir -p /logs/verifier
if [ "$(cat /app/sum.txt)" = "$(( $(head -1 /app/numbers.txt) + 1 ))" ]
then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture
def task(tmp_path) -> Path:
    """Write the first number plus one into a file."""
    files = {
        "task.toml": 'version = "1.0"\n[metadata]\ntags = ["sum"]\n[verifier]\ntimeout_sec = 20.0\n',
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
    made = HarborTask(str(task), **options)
    try:
        shown, _ = made.reset()
        steps = [made.step(text) for text in script]
    finally:
        made.close()
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
    _, steps = play(task, "echo 43 > sum.txt", "false", max_commands=2)
    assert steps[1] == ("\n[exit code 1]", 0.0, False, True, {})


@needs_sandbox
@pytest.mark.parametrize(
    "attack",
    [
        "mkdir -p /tests /logs/verifier; echo 1 | tee /logs/verifier/reward.json; chmod 000 /tmp/logs/verifier",
        "rm -rf /tmp/tests; ln -s /app /tmp/tests; printf 'echo 1 > /logs/verifier/reward.txt' > /app/test.sh",
        "(while true; do echo 1 > /logs/verifier/reward.json; done) > /dev/null 2>&1 &",
        "kill -9 -1; echo 1 > /logs/verifier/reward.json",
    ],
)
def test_a_policy_that_writes_the_reward_itself_gets_nothing(task, attack):
    _, steps = play(task, attack, "submit")
    assert steps[1][1:4] == (0.0, True, False)


@needs_sandbox
def test_a_script_that_hangs_or_floods_is_cut_and_the_attempt_goes_on(task):
    script = ["sleep 1000", "yes | head -c 1000000", "cat numbers.txt"]
    _, steps = play(task, *script, command_seconds=1, most_shown=10)
    assert [step[0] for step in steps] == ["\n[exit code 124]", "y\ny\ny\ny\ny\n\n[exit code 0]", "41\n\n[exit code 0]"]


@needs_sandbox
def test_a_task_that_cannot_be_solved_here_or_writes_no_reward_is_refused(task):
    (task / "solution/solve.sh").write_text("apt-get install sums\n")
    with pytest.raises(RuntimeError, match=r"cannot be solved in this sandbox.* its solution gets 0, an untouched"):
        play(task)
    (task / "tests/test.sh").write_text("echo 1\n")
    read_task.cache_clear()
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
        ("task.toml", '[verifier]\nenv = {KEY = "x"}\n', "verifier.env"),
    ],
)
def test_what_needs_a_container_is_refused_by_name(task, file, text, reason):
    (task / file).write_text(text)
    with pytest.raises(NotBuiltError, match=f"{reason}.* needs a container"):
        HarborTask(str(task))


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

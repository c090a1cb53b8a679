"""Starting, joining and leaving a cluster: what is started, what is refused, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl import env, metrics
from verl.errors import ConfigError
from verl.single_controller.ray import address as addresses
from verl.single_controller.ray import security

LIFE = """
import json, os, sys, psutil, ray
from tests.single_controller.ray.workers import Dice
from verl.single_controller.ray import runtime
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

if __name__ == "__main__":
    me = psutil.Process()
    small = {"num_cpus": 1, "object_store_memory": 100 << 20, "runtime_env": {"py_executable": None}}
    started = runtime.start_cluster([1], ray_init=small)
    again = runtime.start_cluster([1])  # a running connection is kept
    group = RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Dice))
    group.add(1)
    runtime.stop_cluster(timeline_json_file=sys.argv[1])
    runtime.stop_cluster()
    print(json.dumps({"own": started.is_owned, "kept": not again.is_owned, "mode": os.environ["RAY_AUTH_MODE"],
                      "left": [child.name() for child in me.children(recursive=True)]}), flush=True)
    runtime.start_cluster([1], ray_init=small)
    group = RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Dice))
    big = ray.put(b"x" * (20 << 20))
    dashboards = [
        socket
        for child in me.children(recursive=True)
        if "dashboard.py" in " ".join(child.cmdline())
        for socket in child.net_connections()
        if socket.status == psutil.CONN_LISTEN
    ]
    print(json.dumps({"pids": {p.pid: p.cmdline()[0] for p in me.children(recursive=True)}, "worker": group.pid()[0],
                      "dashboards": len(dashboards)}), flush=True)
    group.die(9, 600.0)
"""


@pytest.mark.slow
def test_nothing_of_a_run_outlives_it_whether_it_stops_or_is_killed(tmp_path, project_root):
    script, timeline = tmp_path / "life.py", tmp_path / "timeline.json"
    script.write_text(LIFE)
    before = object_stores()
    run = subprocess.Popen(
        [sys.executable, str(script), str(timeline)],
        cwd=project_root,
        env={**os.environ, "PYTHONPATH": str(project_root), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _follow(run, timeline)
    finally:
        run.kill()
    assert object_stores() <= before


def object_stores() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "plasma" in name}


def _follow(run: subprocess.Popen[str], timeline: Path) -> None:
    lines = (line for line in run.stdout or () if line.startswith("{"))
    stopped = json.loads(next(lines))
    assert stopped == {"own": True, "kept": True, "mode": "token", "left": []}
    assert any("Dice[0].add" in str(event) for event in json.loads(timeline.read_text()))
    alive = json.loads(next(lines))
    assert str(alive["worker"]) in alive["pids"] and alive["dashboards"] == 0
    run.kill()
    run.wait()
    # Ray's two agents per node notice at once and then try for a minute to report it to the control service.
    ours = [int(pid) for pid, title in alive["pids"].items() if "Agent" not in title]
    deadline = time.monotonic() + 60  # four seconds on a quiet machine
    while left := [pid for pid in ours if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, [alive["pids"][str(pid)] for pid in left]
        time.sleep(0.1)


@pytest.mark.slow
def test_without_ray_the_message_says_what_to_install_and_what_works_without(project_root):
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'ray' else find(name, *a)\n"
        "import verl.single_controller.ray"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, cwd=project_root, capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert "MissingDependencyError: trainer.runtime" in last
    assert "pip install -e '.[ray]'" in last and "trainer.runtime=local" in last


def test_importing_the_package_loads_neither_ray_nor_torch(project_root):
    code = "import sys, verl.single_controller.ray\nprint([m for m in ('ray', 'torch') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=project_root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("asked", "message"),
    [([3], r"needs 1 node with 3 CPUs.*this machine: 2"), ([1, 1], r"trainer.nnodes.*ray start --head")],
)
def test_a_run_that_this_machine_cannot_hold_is_refused_before_anything_starts(asked, message):
    from verl.single_controller.ray import runtime

    before = set(psutil.Process().children())  # pools of other tests may wait for work
    with pytest.raises(ConfigError, match=message):
        runtime.start_cluster(asked, ray_init={"address": "local", "num_cpus": 2})
    assert set(psutil.Process().children()) <= before


def test_files_of_a_cluster_of_our_own_lie_where_no_other_user_can_go(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    own = tmp_path / f"verl-{os.geteuid()}"
    assert security.folder_for_files() == f"{own}/ray" and stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o755)
    with pytest.raises(ConfigError, match=r"RAY_TMPDIR.*not a folder of this user's alone.*rm -rf"):
        security.folder_for_files()


def test_a_folder_for_temporary_files_that_is_too_deep_for_sockets_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("d" * 60)))
    assert security.folder_for_files() == f"/tmp/verl-{os.geteuid()}/ray"


# ---- which cluster -------------------------------------------------------------------------------------------------


def test_the_address_comes_from_the_settings_the_shell_or_what_was_started_here(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert addresses.find_address() is None
    with pytest.raises(ConfigError, match="no cluster was started on this machine"):
        addresses.find_address({"address": "auto"})
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert addresses.find_address({}) == "10.0.0.1:6379"
    assert addresses.find_address({"address": "10.0.0.2:6379"}) == "10.0.0.2:6379"
    assert addresses.find_address({"address": "local"}) is None


def test_a_cluster_that_was_started_here_and_is_gone_is_named_and_not_waited_for(tmp_path, monkeypatch):
    metrics.reset_notices()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    assert addresses.find_address() is None
    assert "127.0.0.1:1 is gone" in metrics.notices()["ray"]


def test_an_address_that_does_not_answer_is_refused_in_seconds():
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS: no Ray cluster answers within 0.5 s.*127.0.0.1:1"):
        addresses.wait_for_cluster("127.0.0.1:1", 0.5)
    assert time.monotonic() - start < 30


def test_a_listener_that_is_no_cluster_is_refused_too():
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ConfigError, match="no Ray cluster answers"):
            addresses.wait_for_cluster(f"127.0.0.1:{silent.getsockname()[1]}", 0.3)


@pytest.mark.parametrize("wrong", ["somewhere", "host:", ":6379", "host:port"])
def test_what_is_not_an_address_is_refused(wrong):
    with pytest.raises(ConfigError, match="not an address"):
        addresses.wait_for_cluster(wrong, 0.1)


def test_a_ray_client_address_is_refused_with_the_one_to_use():
    with pytest.raises(ConfigError, match="host:6379"):
        addresses.wait_for_cluster("ray://head:10001", 0.1)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A machine without a token."""
    metrics.reset_notices()
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (security.MODE, security.TOKEN, security.TOKEN_PATH):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(security, "use_token", lambda: env.set_value(security.MODE, "token"))
    return tmp_path


def test_a_cluster_of_our_own_asks_for_a_token_that_only_the_user_can_read(home):
    security.demand_token()
    file = home / ".ray" / "auth_token"
    assert env.get(security.MODE) == "token" and len(file.read_text()) == 64
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text()
    security.demand_token()
    assert file.read_text() == token  # other machines may hold a copy


def test_a_token_that_others_may_read_is_mentioned(home):
    file = home / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("0" * 64)
    file.chmod(0o644)
    for folder in (home, *home.parents):
        if folder.stat().st_mode & 0o011 != 0o011 and folder.owner() == Path.home().owner():
            folder.chmod(folder.stat().st_mode | 0o011)
    security.demand_token()
    assert "chmod 600" in metrics.notices()[security.TOKEN_PATH]


def test_the_shell_may_turn_tokens_off_and_is_told_what_that_means(home, monkeypatch):
    monkeypatch.setenv(security.MODE, "disabled")
    security.demand_token()
    assert not (home / ".ray").exists()
    assert "can run code" in metrics.notices()[security.MODE]


def test_the_token_is_only_sent_to_a_cluster_that_asks_for_it(home, monkeypatch):
    monkeypatch.setattr(addresses, "answers", lambda *_: True)
    asked = []
    monkeypatch.setattr(addresses, "_accepted", lambda address: not asked.append(env.get(security.MODE)))
    monkeypatch.setenv(security.TOKEN, "0" * 64)
    addresses.wait_for_cluster("10.0.0.1:6379", 1)
    assert asked == [None]
    assert "RAY_AUTH_MODE=token" in metrics.notices()[security.MODE]

    monkeypatch.setattr(addresses, "_accepted", lambda address: env.get(security.MODE) == "token")
    addresses.wait_for_cluster("10.0.0.1:6379", 1)
    assert env.get(security.MODE) == "token"


def test_a_cluster_that_asks_for_a_token_that_we_have_not_says_where_to_get_it(home, monkeypatch):
    monkeypatch.setattr(addresses, "answers", lambda *_: True)
    monkeypatch.setattr(addresses, "_accepted", lambda address: False)
    with pytest.raises(ConfigError, match=r"asks for a token and this machine has none.*head node"):
        addresses.wait_for_cluster("10.0.0.1:6379", 1)
    monkeypatch.setenv(security.TOKEN, "0" * 64)
    with pytest.raises(ConfigError, match="refuses this machine's token"):
        addresses.wait_for_cluster("10.0.0.1:6379", 1)


LATE = """
import ray
from verl.single_controller.ray import runtime

if __name__ == "__main__":
    runtime.start_cluster([1], ray_init={"num_cpus": 1, "object_store_memory": 100 << 20})
    runtime.stop_cluster()
    try:
        ray.put(1)
    except ray.exceptions.RaySystemError as error:
        print(error, "connected:", ray.is_initialized())
"""


@pytest.mark.slow
def test_a_call_after_the_end_of_a_run_starts_no_cluster(tmp_path, project_root):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    paths = {**os.environ, "PYTHONPATH": str(project_root)}
    run = subprocess.run([sys.executable, str(script)], env=paths, stdout=subprocess.PIPE, text=True, check=True)
    assert "Ray has not been started yet" in run.stdout and run.stdout.endswith("connected: False\n")

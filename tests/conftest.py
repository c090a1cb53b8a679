"""Fixtures that every test may use, and the thread policy under which the whole suite runs."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

# Before torch is imported anywhere: spinning OpenMP threads beside another busy process are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

pytest_plugins = ["tests.harness.plugin", "tests.harness.fixtures"]

PROJECT_ROOT = Path(__file__).resolve().parent.parent

# Below tests/: what a clock may fail, or another test's sockets, shared memory or processes. Nothing runs beside these.
ALONE = (
    "agent_loop/server/test_bad_agents.py",
    "agent_loop/test_tool_agent.py",
    "faults/test_ray.py",
    "faults/test_signals.py",
    "rewards/managers/test_loop.py",
    "rewards/managers/test_managers.py",
    "rewards/runners/test_process.py",
    "rewards/scorers/test_numina.py",
    "rewards/test_hostile.py",
    "rewards/test_scoring.py",
    "rewards/test_slow_functions.py",
    "rollout/server/",
    "rollout/test_place.py",
    "sandbox/",
    "serving/",
    "single_controller/ray/",
    "tools/test_function_tool.py",
    "trainer/on_ray/",
    "trainer/ppo/test_weight_sync.py",
    "weight_sync/test_transports.py",
)

# What mostly waits for processes that start, and for no clock: one after another, beside the two workers.
WAITING = (
    "trainer/on_ray/test_conversations.py",
    "trainer/on_ray/test_correction.py",
    "trainer/on_ray/test_megatron.py",
    "trainer/on_ray/test_prime.py",
    "trainer/on_ray/test_reward_model.py",
    "trainer/on_ray/test_rollout_workers.py",
    "trainer/on_ray/test_same_numbers.py",
    "trainer/on_ray/test_self_play.py",
    "trainer/on_ray/test_sglang.py",
    "trainer/on_ray/test_starts.py",
    "trainer/on_ray/test_topologies.py",
)

# What one worker runs from its first to its last test: runs of several processes, which would be too many at once, and
# those on the model of tests/harness/arithmetic.py, which takes a minute to make.
ONE_WORKER = {
    "several processes": ("dist/", "distributed/", "faults/", "megatron/"),
    "arithmetic": (
        "e2e/test_extending.py",
        "e2e/test_learning",
        "e2e/test_megatron.py",
        "e2e/test_reward_model.py",
        "e2e/test_single_file.py",
        "e2e/test_two_nodes.py",
    ),
}

# What a test's module imports if its tests start processes or depend on a clock.
CLOCKS = frozenset(("asyncio", "multiprocessing", "ray", "signal", "socket", "subprocess", "threading", "time"))
TIMED_MARKERS = ("alone", "dist", "e2e", "waiting")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real inputs (models, GSM8K, templates): $VERL_SHARED, else ``../shared`` beside the project."""
    folder = Path(os.environ.get("VERL_SHARED") or PROJECT_ROOT.parent / "shared")
    if not (folder / "models").is_dir():
        pytest.fail(f"no shared inputs at {folder}: set VERL_SHARED to the folder that holds models/ and data/", False)
    return folder


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The root of this checkout."""
    return PROJECT_ROOT


@pytest.fixture(scope="session")
def own_ray_folder() -> Iterator[str]:
    """Ray's files and token in a folder of their own; one for all tests, as Ray keeps a process's first token.

    A short path, because it becomes part of the names of sockets.
    """
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    own = {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with mock.patch.dict(os.environ, own):
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            os.environ.pop(name, None)
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what mostly waits and what runs alone, and put the tests into an order.

    One process: cheap tests first, then runs of several processes, then the runs in which a model learns. Several
    workers (scripts/run_tests.py): the longest first, so that all end together.
    """
    for item in items:
        file = _file(item.nodeid)
        if file.startswith(WAITING):
            item.add_marker("waiting")
        elif file.startswith(ALONE):
            item.add_marker("alone")
        if CLOCKS & vars(getattr(item, "module", item)).keys() or any(map(item.get_closest_marker, TIMED_MARKERS)):
            item.add_marker("timed")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: (_one_worker(item.nodeid) not in ONE_WORKER, not item.get_closest_marker("e2e")))
    else:
        items.sort(key=lambda item: (bool(item.get_closest_marker("e2e")), bool(item.get_closest_marker("dist"))))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Hands whole files to the workers, and `ONE_WORKER` to one of them each."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _one_worker(nodeid)

    return Scheduling(config, log)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def _one_worker(nodeid: str) -> str:
    """The name of what has to stay in one worker with this test; its file if nothing else has to."""
    file = _file(nodeid)
    return next((name for name, starts in ONE_WORKER.items() if file.startswith(starts)), file)

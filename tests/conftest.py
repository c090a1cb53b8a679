"""Fixtures that every test may use, and the thread policy under which the whole suite runs."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

# Before torch is imported anywhere: spinning OpenMP threads beside another busy process are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray's workers would get a fifteenth of a core that another test computes on, and all that wait for them with them.
os.environ.setdefault("RAY_worker_niceness", "0")

import pytest

from tests.sanity.source_tree import read_toml

with contextlib.suppress(ImportError):  # trackers have an environment without it
    from hypothesis import HealthCheck, settings

    # On busy cores an example takes as long as it takes.
    settings.register_profile("no clock", deadline=None, suppress_health_check=(HealthCheck.too_slow,))
    settings.load_profile("no clock")

pytest_plugins = ["tests.harness.plugin", "tests.harness.fixtures"]

PROJECT_ROOT = Path(__file__).resolve().parent.parent

# Below tests/: what looks at the files of all Ray runs, or measures the processes of this user. Nothing else runs then.
ALONE = (
    "faults/test_ray.py",
    "sandbox/",
    "single_controller/ray/",
    "trainer/on_ray/",
)

# What mostly waits for processes that start, and for no clock: one after another, while the two workers run.
WAITING = (
    "trainer/on_ray/test_conversations.py",
    "trainer/on_ray/test_correction.py",
    "trainer/on_ray/test_judges.py",
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

# Runs of several processes, which would be too many at once.
PROCESSES = ("dist/", "distributed/", "e2e/test_published_model.py", "faults/", "megatron/")

# What one worker runs from its first to its last test: these, and those on the model of
# tests/harness/arithmetic.py, which takes a minute to make.
ONE_WORKER = {
    "several processes": PROCESSES,
    "arithmetic": (
        "e2e/test_extending.py",
        "e2e/test_learning",
        "e2e/test_megatron.py",
        "e2e/test_reward_model.py",
        "e2e/test_single_file.py",
        "e2e/test_two_nodes.py",
    ),
}

# A test that uses one of these modules, itself or by a function of the tests, starts processes or depends on a clock.
CLOCKS = frozenset(("asyncio", "multiprocessing", "ray", "signal", "socket", "subprocess", "threading", "time"))

REPRESENTATIVES = read_toml(PROJECT_ROOT / "tests" / "representatives.toml")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real inputs (models, GSM8K, templates): $VERL_SHARED, else ``../shared`` next to the project."""
    named = os.environ.get("VERL_SHARED")
    folder = Path(named or PROJECT_ROOT.parent / "shared")
    if not (folder / "models").is_dir():
        missing = f"no shared inputs at {folder}: set VERL_SHARED to the folder that holds models/ and data/"
        # Where somebody set up the inputs, as continuous integration does, their absence is a fault.
        (pytest.fail if named else pytest.skip)(missing)
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
    """Mark what mostly waits, runs alone, may be run again or represents others, and put the tests into an order.

    One process: cheap tests first, then the slow ones. Several workers (scripts/run_tests.py): the longest first, so
    that all end together.
    """
    for item in items:
        file = _file(item.nodeid)
        if file.startswith(WAITING):
            item.add_marker("waiting")
        elif file.startswith(ALONE):
            item.add_marker("alone")
        elif file.startswith(PROCESSES):
            item.add_marker("processes")
        if item.nodeid in REPRESENTATIVES:
            item.add_marker("representative")
        if isinstance(item, pytest.Function) and _is_timed(item):
            item.add_marker("timed")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: (_one_worker(item.nodeid) not in ONE_WORKER, not item.get_closest_marker("slow")))
    else:
        items.sort(key=lambda item: bool(item.get_closest_marker("slow")))


def _is_timed(item: pytest.Function) -> bool:
    """Whether a test, or a fixture that it takes, uses a module of `CLOCKS`."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(_uses_a_clock(function) for function in (item.obj, *(found[-1].func for found in fixtures)))


@functools.cache
def _uses_a_clock(function: Callable[..., Any]) -> bool:
    """Whether a function, or a function of the tests that it names, uses a module of `CLOCKS`."""
    function = getattr(function, "__wrapped__", getattr(function, "__func__", function))
    todo, seen = [function], set()
    while todo:
        current = todo.pop()
        code, scope = getattr(current, "__code__", None), getattr(current, "__globals__", {})
        if code is None or code in seen:
            continue
        seen.add(code)
        for value in (scope[name] for name in _names(code) if name in scope):
            module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            if str(module).partition(".")[0] in CLOCKS:
                return True
            if str(module).startswith("tests"):
                todo += [value, *(vars(value).values() if isinstance(value, type) else ())]
    return False


def _names(code: types.CodeType) -> set[str]:
    """The names that a function and the functions inside it look up."""
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


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

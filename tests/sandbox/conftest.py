"""Pools for the tests of the sandbox: with all its walls, and with each one missing that may be missing.

A mode that this machine's kernel does not offer is left out, and named in the report's header, not counted as passed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.sandboxes import MODES, NEWEST_LANDLOCK, OFFERED, arguments, open_pool
from tests.sandbox.attacks import Box
from verl.sandbox import Pool


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "box" in metafunc.fixturenames:
        wanted = getattr(metafunc.module, "ONLY_MODES", OFFERED)
        metafunc.parametrize("box", [mode for mode in OFFERED if mode in wanted], indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the whole sandbox need a machine that offers it; those of what one layer gives, that layer."""
    dropped = [item for item in items if not _can_run(item)]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


def _can_run(item: pytest.Item) -> bool:
    if "whole" not in OFFERED and "pool" in getattr(item, "fixturenames", ()):
        return False
    return not any(set(mark.args) & set(MODES["whole"]) for mark in item.iter_markers("needs_layers"))


def pytest_report_header() -> str:
    offered = f"{', '.join(OFFERED) or 'none'} (of {', '.join(MODES)})"
    return f"sandbox modes that this machine offers with Landlock up to version {NEWEST_LANDLOCK}: {offered}"


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[str, Pool]]:
    opened: dict[str, Pool] = {}
    yield opened
    for pool in opened.values():
        pool.close()


@pytest.fixture(scope="session")
def box(request: pytest.FixtureRequest, pools: dict[str, Pool]) -> Box:
    """A sandbox in each mode that this machine offers."""
    mode = request.param
    if mode not in pools:
        pools[mode] = open_pool(mode)
    return Box(pools[mode], MODES[mode], arguments(mode))


@pytest.fixture(scope="session")
def pool(pools: dict[str, Pool]) -> Pool:
    """The whole sandbox."""
    if "whole" not in pools:
        pools["whole"] = open_pool("whole")
    return pools["whole"]

"""Pools for the tests of the sandbox: with all its walls, and with each one missing that may be missing.

A mode that this machine's kernel does not offer is left out, and named in the report's header, not counted as passed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sandbox.attacks import Box
from verl.sandbox import LAYERS, Pool, SandboxRefused

MODES: dict[str, tuple[str, ...]] = {"whole": (), **{f"without {layer}": (layer,) for layer in LAYERS}}


def open_pool(mode: str, size: int | None = None) -> Pool:
    """A pool in this mode; without layers, they are left out even where the machine has them."""
    return Pool(size, allow_missing=MODES[mode], without=MODES[mode])


def offered_modes() -> list[str]:
    """The modes that this machine can run."""
    found = []
    for mode in MODES:
        with open_pool(mode) as pool:
            try:
                pool.prepare()
            except SandboxRefused:
                continue
        found.append(mode)
    return found


OFFERED = offered_modes()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "box" in metafunc.fixturenames:
        metafunc.parametrize("box", OFFERED, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the whole sandbox need a machine that offers it."""
    if "whole" in OFFERED:
        return
    dropped = [item for item in items if "pool" in getattr(item, "fixturenames", ())]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)


def pytest_report_header() -> str:
    return f"sandbox modes that this machine offers: {', '.join(OFFERED) or 'none'} (of {', '.join(MODES)})"


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
    return Box(pools[mode], MODES[mode])


@pytest.fixture(scope="session")
def pool(pools: dict[str, Pool]) -> Pool:
    """The whole sandbox."""
    if "whole" not in pools:
        pools["whole"] = open_pool("whole")
    return pools["whole"]

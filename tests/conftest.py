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

PROJECT_ROOT = Path(__file__).resolve().parent.parent


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
    """Cheap tests first: rules and units, then runs of several processes, then the runs in which a model learns."""
    items.sort(key=lambda item: (bool(item.get_closest_marker("e2e")), bool(item.get_closest_marker("dist"))))

"""Ray for tests: its files and its token live in a folder of their own, not in the user's."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_ray_folder() -> Iterator[str]:
    """A short path, because it becomes part of the names of sockets."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    own = {"RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with mock.patch.dict(os.environ, own):
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            os.environ.pop(name, None)
        yield folder
    shutil.rmtree(folder, ignore_errors=True)

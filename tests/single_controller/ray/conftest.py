"""Ray for tests: its files and its token live in a folder of their own, not in the user's."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def ray_of_our_own(own_ray_folder: str) -> None:
    """Every test of this folder."""

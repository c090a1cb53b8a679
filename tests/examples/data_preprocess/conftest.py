"""A tokenizer to read prepared rows with, and no notices of another test."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.models import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level tokenizer: one character of ASCII is one token."""
    return tiny_tokenizer()

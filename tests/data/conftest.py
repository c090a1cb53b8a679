"""Tokenizers of the model families, trained once per test session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.families import family_tokenizer
from tests.harness.models import tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level tokenizer with a plain ChatML template: one character of ASCII is one token."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def family(shared: Path) -> Callable[[str], Any]:
    """``family('qwen3')``: that family's template with a tokenizer of its own."""
    return functools.cache(functools.partial(family_tokenizer, shared))

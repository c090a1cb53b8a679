"""A small model that sees, written once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.data.tokenizer import hf_tokenizer
from verl.data.vision.processor import load_processor


@pytest.fixture(scope="session")
def seeing_folder(seeing_model: Callable[..., Path]) -> Path:
    return seeing_model()


@pytest.fixture(scope="session")
def seeing_tokenizer(seeing_folder: Path) -> Any:
    return hf_tokenizer(seeing_folder)


@pytest.fixture(scope="session")
def processor(seeing_folder: Path, seeing_tokenizer: Any) -> Any:
    return load_processor(seeing_folder, seeing_tokenizer)

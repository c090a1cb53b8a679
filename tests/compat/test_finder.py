"""Modules under upstream's names are ordinary modules: to pickle, to tracebacks, to ``python -m``."""

from __future__ import annotations

import importlib
import inspect
import pickle
import runpy
import subprocess
import sys

import pytest

import verl
from verl.compat import UpstreamPaths
from verl.utils import fsdp_utils


def test_a_module_has_upstreams_name_and_its_true_file():
    module = importlib.import_module("verl.utils.reward_score.math_reward")
    assert module.__name__ == module.__spec__.name == "verl.utils.reward_score.math_reward"
    assert module.__file__.endswith("verl/compat/paths/utils/reward_score/math_reward.py")
    assert inspect.getsource(module.remove_boxed).startswith("def remove_boxed")


def test_what_is_defined_there_travels_to_a_process_that_has_imported_nothing():
    from verl.workers.rollout.schemas import Message

    data = pickle.dumps(Message("user", "hi"))
    code = "import sys, pickle; print(pickle.loads(sys.stdin.buffer.read()).content)"
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert done.stdout == b"hi\n"


def test_a_module_can_be_run_as_a_program():
    assert runpy.run_module("verl.utils.reward_score.gsm8k")["compute_score"]("#### 3", "3") == 1.0


def take(name: str) -> None:
    """A ``from`` import of one name, which is nowhere."""
    exec(f"from {fsdp_utils.__name__} import {name}")


def test_what_is_nowhere_is_an_ordinary_import_error():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'verl\.nothing'"):
        importlib.import_module("verl.nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        take("nothing")
    assert not hasattr(fsdp_utils, "nothing")


def test_an_absent_name_says_what_there_is_instead():
    with pytest.raises(ImportError, match=r"collect_lora_params does not exist here.*export_weights"):
        take("collect_lora_params")
    with pytest.raises(ModuleNotFoundError, match=r"verl\.models\.mcore does not exist here.*engines\.megatron"):
        importlib.import_module("verl.models.mcore")


def test_an_absent_name_is_not_there_for_hasattr_and_getattr():
    assert not hasattr(fsdp_utils, "collect_lora_params")
    assert getattr(fsdp_utils, "collect_lora_params", None) is None
    with pytest.raises(AttributeError, match=r"collect_lora_params does not exist here.*export_weights"):
        fsdp_utils.collect_lora_params  # noqa: B018


def test_the_finder_is_there_once_and_minds_only_this_package():
    importlib.reload(verl)
    assert sys.meta_path.count(UpstreamPaths) == 1
    assert UpstreamPaths.find_spec("verl") is None and UpstreamPaths.find_spec("json.decoder") is None


def test_modules_named_in_the_environment_are_imported_with_the_package(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from verl.workers.reward_manager import register\n@register('mine')\nclass Mine: ...\n"
    )
    code = "import verl; from verl.registry import REWARD_MANAGERS; print(REWARD_MANAGERS.get('mine').__module__)"
    environment = {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "VERL_USE_EXTERNAL_MODULES": "mine"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "mine\n", done.stderr

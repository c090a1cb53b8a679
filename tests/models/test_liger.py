"""`use_liger`: refused by name where it cannot work, passed on where it can."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest

from tests.harness.engines import make_engine
from tests.harness.models import tiny_model_dir
from verl.errors import ConfigError, ModelError
from verl.models import load_causal_lm
from verl.models.liger import apply_liger


@pytest.fixture
def liger(monkeypatch):
    """A stand-in for the package, which records how it is called."""
    calls = []
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen2": None}
    patches._apply_liger_kernel_to_instance = lambda **arguments: calls.append(arguments)
    package = types.ModuleType("liger_kernel")
    package.__spec__ = importlib.machinery.ModuleSpec("liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", types.ModuleType("liger_kernel.transformers"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    return calls


def test_without_a_gpu_it_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"use_liger.*need a GPU"):
        make_engine(tiny_model_dir(tmp_path), model={"use_liger": True})


def test_without_the_package_the_fix_is_its_extra(tmp_path):
    with pytest.raises(ConfigError, match=r"liger-kernel is not installed.*pip install -e .*liger"):
        apply_liger(load_causal_lm(str(tiny_model_dir(tmp_path))), "cuda")


def test_the_model_goes_to_its_patches_without_its_fused_loss(tmp_path, liger):
    model = load_causal_lm(str(tiny_model_dir(tmp_path)))
    apply_liger(model, "cuda")
    assert liger == [{"model": model, "cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_a_family_that_it_does_not_know_is_an_error(tmp_path, liger):
    with pytest.raises(ModelError, match=r"no kernels for this family.*Got 'qwen3'"):
        apply_liger(load_causal_lm(str(tiny_model_dir(tmp_path, "qwen3"))), "cuda")

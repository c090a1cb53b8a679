"""Tests against vLLM itself: they are collected only where it is installed (``make test-vllm``)."""

from __future__ import annotations

import importlib.util
import os

import pytest

# Before vLLM is imported: the engine in this process, little memory, and no network.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    """A Qwen2 with heads of 32, which vLLM's CPU kernels take, and weights wide enough that attention matters."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.harness.models import tiny_model_dir

    made = tiny_model_dir(tmp_path_factory.mktemp("model"), hidden=128, heads=4, kv_heads=2)
    file = made / "model.safetensors"
    weights = {k: v * 3 if v.dim() > 1 else v for k, v in load_file(str(file)).items()}
    assert all(torch.isfinite(v).all() for v in weights.values())
    save_file(weights, str(file), metadata={"format": "pt"})
    return made

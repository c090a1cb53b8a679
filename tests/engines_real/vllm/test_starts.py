"""A configuration with vLLM resolves if and only if it starts: one process, two, heads that do not divide."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.models import tiny_model_dir
from tests.matrix.cells import prepare, reason, start, unchecked, usual
from verl.config import load_config

pytestmark = pytest.mark.slow
VLLM = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.name=vllm")
TWO = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
EVEN, ODD = "actor_rollout_ref.model.path=@even", "actor_rollout_ref.model.path=@odd"
CELLS = {(*VLLM, EVEN): True, (*VLLM, *TWO, EVEN): True, (*VLLM, *TWO, ODD): False}
"""Words -> whether they start; attention heads are 32 wide, as vLLM's CPU kernels want."""


@pytest.mark.parametrize("words", CELLS, ids=["one process", "two processes", "three heads over two"])
def test_what_resolves_starts_and_what_is_refused_does_not(words, own_ray_folder, tmp_path: Path):
    prepare(tmp_path)
    tiny_model_dir(tmp_path / "even", hidden=128, heads=4, kv_heads=2)
    tiny_model_dir(tmp_path / "odd", hidden=96, heads=3, kv_heads=3)
    line = usual("ppo_trainer", tmp_path, 0, [*words])
    refused = reason(load_config, "ppo_trainer", line)
    with unchecked():
        failed = reason(start, "ppo_trainer", line, None)
    print(refused, failed, sep="\n")
    assert (refused is None, failed is None) == (CELLS[words], CELLS[words])
    assert CELLS[words] or "heads" in refused

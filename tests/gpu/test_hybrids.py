"""Layers that carry a state on CUDA: packed rows are rows one by one, with torch's own formulas."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.engines.hybrids import PACKED, hybrid_dir
from tests.harness.engines import gradients, grouped_batch, make_engine, relative_error
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.engines.settings import PassSettings


def test_packed_rows_with_shared_prompts_give_the_gradient_of_rows_one_by_one() -> None:
    loss, shared = PPOPolicyLoss(ActorConfig()), PassSettings(share_prompts=True)
    batch, worst = grouped_batch(prompts=2, samples=3, prompt=9, response=40), {}
    for family in PACKED:
        with tempfile.TemporaryDirectory() as folder:
            path = hybrid_dir(Path(folder), family)
            packed = make_engine(path, engine={"dtype": "float32"}, passes=shared, device="cuda")
            assert packed.forward.passes == shared, family
            alone = make_engine(path, engine={"dtype": "float32"}, model={"use_remove_padding": False}, device="cuda")
            (_, ours), (_, expected) = (
                gradients(packed, batch, loss),
                gradients(alone, batch, loss, micro_batch_size=1),
            )
            worst[family] = relative_error(ours, expected)
    assert max(worst.values()) < 1e-4, worst

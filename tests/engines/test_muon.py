from __future__ import annotations

import pytest
import torch

from tests.harness.engines import make_engine, model_dir, ragged_batch
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.engines.muon import Muon, orthogonal

TORCH = (3.4445, -4.7750, 2.0315)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_the_polynomial_is_applied_to_singular_values(shape):
    """In float64, by the decomposition that the iterations spare."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = TORCH[0] * s + TORCH[1] * s**3 + TORCH[2] * s**5
    assert ((s > 0.6) & (s < 1.3)).all()
    torch.testing.assert_close(orthogonal(matrix, TORCH, 5, 1e-7).double(), u * s @ v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_updates_are_those_of_torch_for_matrices_and_of_adamw_for_the_others(rule):
    """torch iterates in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (
        [torch.nn.Parameter(t.clone()) for t in (torch.ones(12, 8), torch.ones(5), torch.ones(4, 8))] for _ in range(2)
    )
    muon = Muon(ours, ours[:1], lr=0.1, weight_decay=0.2, adjust_lr_fn=rule)
    beside = [
        torch.optim.Muon(theirs[:1], lr=0.1, weight_decay=0.2, adjust_lr_fn=rule),
        torch.optim.AdamW(theirs[1:], lr=0.1, weight_decay=0.2),
    ]
    for _ in range(3):
        for own, other in zip(ours, theirs):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        for optimizer in (muon, *beside):
            optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0.02)
    assert (ours[0] - 1).abs().max() > 0.1
    for own, other in zip(ours[1:], theirs[1:]):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_matrices_of_layers_take_muon_and_embeddings_head_and_vectors_adamw(tmp_path):
    engine = make_engine(model_dir(tmp_path, "llama"), optim={"optimizer": "Muon"})
    engine.train_batch(ragged_batch(), PPOPolicyLoss(ActorConfig()))
    names = [n.removeprefix("optimizer/") for n in engine.state().tensors if n.startswith("optimizer/")]
    muon = {n.rpartition("/")[0] for n in names if n.endswith("/momentum_buffer")}
    others = {n.rpartition("/")[0] for n in names if n.endswith("/exp_avg")}
    assert not muon & others and len(muon) == 2 * 7
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < others
    assert all("_proj" in n for n in muon)

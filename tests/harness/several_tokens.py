"""Several tokens per position: an engine over ranks beside the plain engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.harness.engines import relative_error
from verl.algorithms.distillation import DistilledPolicyLoss
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.config.schema.algorithm import DistillationLossConfig
from verl.engines.settings import PassSettings
from verl.protocol import DataProto

K, TEMPERATURE, STEPS = 5, 0.7, 2
LISTED, CANDIDATES = ("top_k_ids", "top_k_log_probs"), ("candidate_log_probs",)


def distilled(
    make: Callable[..., Any], plain: Callable[..., Any], batch: DataProto, rows: Sequence[int]
) -> dict[str, float]:
    """Relative errors of a model's most likely tokens, of given tokens, and of steps of distillation.

    Args:
        make, plain: of ``trains`` and ``passes``: the engine over ranks, and the plain engine, on the same weights.
        rows: of the batch that this rank has.
    """
    passes, limits = PassSettings(top_k=K), {"micro_batch_size": 2}
    listed = make(trains=False, passes=passes).infer(batch[rows], LISTED, TEMPERATURE, **limits)
    expected = plain(trains=False, passes=passes).infer(batch, LISTED, TEMPERATURE)
    errors = {"kinds": float(any(listed[name].dtype != expected[name].dtype for name in LISTED))}
    errors["ids"] = float((listed["top_k_ids"] != expected["top_k_ids"][rows]).any())
    errors["likely"] = relative_error(listed["top_k_log_probs"], expected["top_k_log_probs"][rows])
    generator = torch.Generator().manual_seed(1)
    ids = expected["top_k_ids"].clone()
    ids[..., :2] = torch.randint(0, 200, ids[..., :2].shape, generator=generator, dtype=torch.int32)
    teacher = torch.log_softmax(torch.randn(*ids.shape[:-1], 2 * K, generator=generator), -1)[..., :K]
    batch.tensors["candidate_ids"], batch.tensors["candidate_teacher_log_probs"] = ids, teacher
    student, reference = make(trains=True, passes=None), plain(trains=True, passes=None)
    computed = student.infer(batch[rows], CANDIDATES, TEMPERATURE, **limits)[CANDIDATES[0]]
    errors["given"] = relative_error(computed, reference.infer(batch, CANDIDATES, TEMPERATURE)[CANDIDATES[0]][rows])
    loss = DistilledPolicyLoss(PPOPolicyLoss(ActorConfig()), DistillationLossConfig(loss_mode="reverse_kl_topk"))
    for _ in range(STEPS):
        step = student.train_batch(batch[rows], loss, TEMPERATURE, **limits).values()
        exact = reference.train_batch(batch, loss, TEMPERATURE).values()
        for name in ("loss", "grad_norm", "distillation/loss"):
            errors[name] = max(errors.get(name, 0.0), abs(step[name] / exact[name] - 1))
    return errors

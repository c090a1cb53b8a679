"""Distillation: a student learns what a frozen teacher finds likely, on its samples or on the answers of a file.

Agarwal et al. 2024 (GKD, arXiv 2306.13649). With s the student's and t the teacher's distribution at one position, and
m = beta t + (1 - beta) s:

===================  ==================================================  =====================================
kind                 value                                               reads of the teacher
===================  ==================================================  =====================================
of `verl.algorithms.kl.ESTIMATORS`, also with ``+``                      its log-prob of the sampled token
``forward_kl_topk``  sum_{v in K} t(v) (log t(v) - log s(v))             its k most likely tokens K
``reverse_kl_topk``  sum_{v in K} s(v) (log s(v) - log t(v)) + tail      its k most likely tokens K
``jsd_topk``         beta KL(t || m) + (1 - beta) KL(s || m) over K      its k most likely tokens K
                     and the tail
===================  ==================================================  =====================================

Where k is the vocabulary the last three are exact: KL(t || s), KL(s || t), the generalised Jensen-Shannon divergence.
With fewer tokens the first leaves the others out. The other two count them as one token, the tail: a student that only
left K would otherwise gain. On answers of a file both models are in one process, and the same names without ``_topk``
compare all tokens.
Shapes: b rows of a micro-batch, T response tokens, K tokens per position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.aggregation import LossNorm, agg_loss, loss_metric, token_means
from verl.algorithms.kl import kl_penalty
from verl.algorithms.logprob import candidate_log_probs, top_k_from_logits
from verl.algorithms.losses import Fields, PPOPolicyLoss, SFTLoss, field, optional_field, with_length
from verl.algorithms.masked import at_least_float32, zero_outside
from verl.algorithms.policy_losses import aggregation_of, call_policy_loss
from verl.config import replace as replace_settings
from verl.config.schema.algorithm import TOP_K_KINDS, DistillationLossConfig
from verl.metrics import Metric, as_float
from verl.registry import POLICY_LOSSES

TAIL_FLOOR = 1e-6
"""Smallest probability of a tail: below it float32 has only the rounding errors of the sum over K."""
OF_TOKEN, OF_CANDIDATES = "teacher_log_probs", "candidate_teacher_log_probs"
"""Columns of a batch, (B, T) and (B, T, K): the teacher's log-probs of sampled tokens, and of its most likely ones."""


def divergence_terms(student: Tensor, teacher: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Log-probs of tokens under both, of any shape -> what each adds to ``forward_kl``, ``reverse_kl`` or ``jsd``."""
    if kind == "forward_kl":
        return _kl_terms(teacher, student)
    if kind == "reverse_kl":
        return _kl_terms(student, teacher)
    assert kind == "jsd", f"{kind} reads single tokens"
    # Where both models exclude a token the sum would be log 0, whose gradient is NaN; the terms there are 0.
    possible = (student > -torch.inf) | (teacher > -torch.inf)
    s, t = (torch.where(possible, x, 0.0) for x in (student, teacher))
    mixture = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
    return beta * _kl_terms(teacher, mixture) + (1 - beta) * _kl_terms(student, mixture)


def _kl_terms(p: Tensor, q: Tensor) -> Tensor:
    """exp(p) (p - q) of log-probs, 0 with gradient 0 where exp(p) is 0."""
    possible = p > -torch.inf
    return p.exp() * (torch.where(possible, p, 0.0) - torch.where(possible, q, 0.0))


def top_k_divergence(
    student: Tensor, teacher: Tensor, kind: str, floor: float | None = None, beta: float = 0.5
) -> Tensor:
    """(..., K) log-probs of the same tokens under both -> (...): one of `TOP_K_KINDS`.

    Args:
        floor: lower bound of the log-probs of tokens; the tail is counted without it.
        beta: weight of the teacher in the mixture of ``jsd_topk``.
    """
    kind = kind.removesuffix("_topk")
    of_student, of_teacher = ((1 - x.exp().sum(-1)).clamp(min=TAIL_FLOOR) for x in (student, teacher))
    if floor is not None:
        student, teacher = student.clamp(min=floor), teacher.clamp(min=floor)
    divergence = divergence_terms(student, teacher, kind, beta).sum(-1)
    if kind == "forward_kl":
        return divergence
    return divergence + divergence_terms(of_student.log(), of_teacher.log(), kind, beta)


def logits_divergence(
    student: Tensor, teacher: Tensor, kind: str, topk: int = 32, beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """(..., V) logits of both -> (...): one of `TOP_K_KINDS`, or with all tokens the same without ``_topk``.

    Args:
        topk: tokens per position of `TOP_K_KINDS`.
        temperature: the logits of both are divided by it.
    """
    student, teacher = (at_least_float32(z) / temperature for z in (student, teacher))
    if kind not in TOP_K_KINDS:
        return divergence_terms(student.log_softmax(-1), teacher.log_softmax(-1), kind, beta).sum(-1)
    log_probs, ids = top_k_from_logits(teacher, topk)
    return top_k_divergence(candidate_log_probs(student, ids), log_probs, kind, beta=beta)


class DistilledSFTLoss:
    """``(1 - alpha) * nll + alpha * divergence``, means over the label tokens of the mini-batch.

    Metrics: ``distillation/loss``, and those of `SFTLoss`. The engine computes the divergence from its teacher's logits
    (`Engine.compare_with`).
    """

    outputs = ("log_probs", "full_kl")

    def __init__(self, alpha: float):
        self.alpha = alpha

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Fields, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask = field(batch, "response_mask")
        log_probs = outputs["log_probs"] if self.alpha < 1 else outputs["log_probs"].detach()
        nll, metrics = SFTLoss()({"log_probs": log_probs}, batch, norm)
        divergence = agg_loss(outputs["full_kl"], mask, "token-mean", norm)
        metrics["distillation/loss"] = loss_metric(as_float(divergence.detach()), mask, "token-mean", norm)
        return (1 - self.alpha) * nll + self.alpha * divergence, metrics


class DistilledPolicyLoss:
    """The actor's objective with a teacher: ``task loss + coef * distillation loss``, or the second alone.

    With ``use_policy_gradient`` the negative divergence of each token is its advantage in a policy loss, and has no
    gradient itself.

    Metrics: ``distillation/loss``, ``.../loss_min``, ``.../loss_max`` and ``.../abs_loss`` over tokens,
    ``.../clamped_tokens`` (a share) with a clamp; of several tokens per position also ``.../student_mass`` and
    ``.../teacher_mass``, the probability that both give to them. Those of the task loss keep their names.

    Args:
        task: the actor's objective without a teacher.
        settings: the section ``distillation.distillation_loss``.
    """

    def __init__(self, task: PPOPolicyLoss, settings: DistillationLossConfig):
        self.task, self.settings = task, settings
        self.top_k = settings.loss_mode in TOP_K_KINDS
        more = ("candidate_log_probs",) if self.top_k else ()
        outputs = task.outputs if settings.use_task_rewards else ("log_probs",)
        self.outputs: tuple[str, ...] = (*outputs, *more)
        self.rows_together = task.rows_together
        self.weight_shares = task.weight_shares if settings.use_task_rewards else None
        self.policy_loss = POLICY_LOSSES.get(settings.policy_loss_mode)
        names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high") if settings.use_policy_gradient else ()
        self.policy_settings = replace_settings(task.config, **{name: settings[name] for name in names})

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Fields, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask, mode = field(batch, "response_mask"), self.task.config.loss_agg_mode
        norm = with_length(norm, self.task.scale)
        tokens, metrics = self.divergence(outputs, batch, mask)
        metrics["distillation/loss"] = loss_metric(
            as_float(agg_loss(tokens.detach(), mask, mode, norm)), mask, mode, norm
        )
        if self.settings.use_policy_gradient:
            loss = self._policy_gradient(zero_outside(outputs["log_probs"], mask), tokens.detach(), batch, norm)
        else:
            loss = agg_loss(tokens, mask, mode, norm)
        total = self.settings.distillation_loss_coef * loss
        if self.settings.use_task_rewards:
            of_task, measured = self.task(outputs, batch, norm)
            total, metrics = of_task + total, {**measured, **metrics}
        return total, metrics

    def divergence(
        self, outputs: Mapping[str, Tensor], batch: Fields, mask: Tensor
    ) -> tuple[Tensor, dict[str, Metric]]:
        """(b, T) of each token, 0 outside the mask, with what is measured of it."""
        settings, metrics = self.settings, dict[str, Metric]()
        student, teacher = (
            (outputs["candidate_log_probs"], field(batch, OF_CANDIDATES))
            if self.top_k
            else (outputs["log_probs"], field(batch, OF_TOKEN))
        )
        # What lies outside the mask is never read: junk there must not become NaN times zero.
        inside = mask.bool()[..., None] if self.top_k else mask.bool()
        student, teacher = torch.where(inside, student, 0.0), torch.where(inside, teacher.to(student), 0.0)
        floor = settings.log_prob_min_clamp
        if self.top_k:
            tokens = top_k_divergence(student, teacher, settings.loss_mode, floor, settings.beta)
            masses = {"student_mass": student.detach().exp().sum(-1), "teacher_mass": teacher.exp().sum(-1)}
            metrics |= token_means({f"distillation/{name}": mass for name, mass in masses.items()}, mask)
        else:
            bounded = (student, teacher) if floor is None else (student.clamp(min=floor), teacher.clamp(min=floor))
            tokens = kl_penalty(*bounded, settings.loss_mode)
        bound = settings.loss_max_clamp
        if bound is not None:
            metrics |= token_means({"distillation/clamped_tokens": (tokens.abs() > bound).float()}, mask)
            tokens = tokens.clamp(-bound, bound)
        tokens = zero_outside(tokens, mask)
        return tokens, metrics | _spread(tokens.detach(), mask)

    def _policy_gradient(self, log_prob: Tensor, divergence: Tensor, batch: Fields, norm: LossNorm) -> Tensor:
        """The policy loss whose advantages are the negative divergences (b, T); its metrics are dropped."""
        loss, _ = call_policy_loss(
            self.policy_loss,
            old_log_prob=self.task.old_log_prob(batch, log_prob),
            log_prob=log_prob,
            advantages=-divergence,
            response_mask=field(batch, "response_mask"),
            loss_agg_mode=aggregation_of(self.policy_loss, self.task.config.loss_agg_mode),
            config=self.policy_settings,
            norm=norm,
            rollout_is_weights=optional_field(batch, "rollout_is_weights"),
        )
        return loss


def _spread(tokens: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Smallest, largest and mean absolute divergence of the valid tokens; none where there are none."""
    valid = tokens[mask.bool()]
    if not len(valid):
        return {}
    return {
        "distillation/loss_min": Metric(valid.min().item(), "min"),
        "distillation/loss_max": Metric(valid.max().item(), "max"),
        **token_means({"distillation/abs_loss": tokens.abs()}, mask),
    }

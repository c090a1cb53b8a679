"""The closures that the engines call: outputs of a forward pass and a micro-batch in, a loss and metrics out.

An engine knows no algorithm: it reads from `LossFn.outputs` what to compute, and calls the closure once per micro-batch
with the norm of the whole mini-batch. Metrics carry no prefix (the trainer adds ``actor/`` or ``critic/``), and each
merges by itself to its value over the mini-batch. Shapes: b rows of the micro-batch, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from verl.algorithms.aggregation import LossNorm, agg_loss, check_agg_mode, loss_metric, loss_norm, token_means
from verl.algorithms.calls import names_parameter
from verl.algorithms.kl import check_kl_kind, kl_penalty
from verl.algorithms.masked import zero_outside
from verl.algorithms.policy_losses import aggregation_of, call_policy_loss
from verl.algorithms.policy_losses.bypass import correction_settings, normalises
from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.rollout_correction import Correction, weight_shares
from verl.algorithms.rollout_correction.mismatch import current_policy_metrics
from verl.algorithms.value_loss import value_loss
from verl.config.schema.actor import ActorConfig, CriticConfig, PolicyLossConfig
from verl.errors import ConfigError, DataError
from verl.metrics import Metric, as_float
from verl.protocol.fields import SHARES
from verl.registry import POLICY_LOSSES

OF_BYPASS_MODE = ("vanilla", "bypass_mode", "rollout_correction")


class Fields(Protocol):
    """The tensors of a micro-batch by name: a mapping or a TensorDict."""

    def keys(self) -> Iterable[object]: ...

    def __getitem__(self, name: str, /) -> Tensor: ...


class LossFn(Protocol):
    """What an engine minimises."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the forward pass must return: of ``log_probs``, ``entropy``, ``full_kl``, ``values``; each (b, T)."""
        ...

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Fields, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Metric]]: ...


def known_slopes(loss_fn: LossFn, batch: Fields, norm: LossNorm) -> Tensor | None:
    """(b, T) d loss / d log_probs where the loss says that no log-prob changes it (``slopes_known``), else None."""
    if not getattr(loss_fn, "slopes_known", lambda _: False)(batch):
        return None
    anywhere = torch.zeros_like(field(batch, "response_mask"), dtype=torch.float32).requires_grad_()
    loss, _ = loss_of_rows(loss_fn, {"log_probs": anywhere}, batch, norm)
    return torch.autograd.grad(loss, anywhere)[0]


def without_gradient(loss_fn: LossFn, batch: Fields) -> list[bool]:
    """Of each row whether none of its log-probs changes the loss or a metric, so that no pass has to find them.

    On policy these are the rows of advantage 0: of a group in which all answers have one reward, all.
    """
    mask = field(batch, "response_mask")
    slopes = None
    if len(mask) and mask.any() and not getattr(loss_fn, "measures_log_probs", lambda _: False)(batch):
        slopes = known_slopes(loss_fn, batch, loss_norm(mask))
    return [False] * len(mask) if slopes is None else (slopes == 0).all(-1).tolist()


def mean_weight(
    loss_fn: LossFn, passes: Callable[[], Iterable[tuple[Tensor, Any]]], sum_over_ranks: Callable[[Tensor], Tensor]
) -> float | None:
    """The mean importance weight of a mini-batch where the loss divides by it (``weight_shares``), else None.

    The loss weighs by the present policy, so that the mean takes a pass over all micro-batches before the first
    backward pass. Ranks that hold the same rows may all count them: sum and number grow alike.

    Args:
        passes: yields the log-probs (b, T) of the present policy and their rows, micro-batch by micro-batch; called
            only if the mean is needed.
        sum_over_ranks: of a tensor of two numbers. Collective.
    """
    shares = getattr(loss_fn, "weight_shares", None)
    if shares is None:
        return None
    total = torch.zeros(2, dtype=torch.float64)
    for log_probs, rows in passes():
        total += shares(log_probs, rows)
    weights, number = sum_over_ranks(total).tolist()
    return weights / number if number else None


def shares_of(rows: Fields) -> Tensor | None:
    """(b,) of `LossNorm`; None where each row is a sequence."""
    return optional_field(rows, SHARES)


def loss_of_rows(
    loss_fn: LossFn, outputs: Mapping[str, Tensor], rows: Fields, norm: LossNorm
) -> tuple[Tensor, dict[str, Metric]]:
    """The loss of some rows of a mini-batch, whose norm gets their shares."""
    return loss_fn(outputs, rows, replace(norm, shares=shares_of(rows)))


def with_length(norm: LossNorm, scale: float | None) -> LossNorm:
    """The norm with the constant length, where the configuration says one."""
    return norm if scale is None else replace(norm, loss_scale_factor=float(scale))


class PPOPolicyLoss:
    """The actor's objective: ``pg_loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference)``.

    With ``positive_lm_coef`` also that times the mean of ``-log_prob`` over the tokens of right answers (VAPO).

    Metrics: ``pg_loss``, those of the policy loss (``pg_clipfrac``, ``pg_clipfrac_lower``, ``ppo_kl``), ``entropy`` and
    ``entropy_loss`` where the entropy is computed, ``kl_loss`` and ``kl_coef`` where the KL is in the loss,
    ``positive_nll`` with the loss on right answers. Where the sampler is corrected for,
    ``rollout_corr/current_*``: how far the policy that is being trained has moved from it.

    Args:
        config: the section ``actor_rollout_ref.actor``.
        response_length: the configured maximum; what ``seq-mean-token-sum-norm`` divides by where
            ``loss_scale_factor`` is null.
        use_rollout_log_probs: the sampler's log-probs are the old policy (bypass mode, asynchronous training).

    A batch without ``old_log_probs`` is on policy: its ratio is exactly 1, and the old policy is the detached new one.
    """

    def __init__(self, config: ActorConfig, response_length: int | None = None, use_rollout_log_probs: bool = False):
        check_agg_mode(config.loss_agg_mode, key="actor_rollout_ref.actor.loss_agg_mode")
        if config.use_kl_loss:
            check_kl_kind(config.kl_loss_type, key="actor_rollout_ref.actor.kl_loss_type", logits_at_hand=True)
        Clip.of(config)
        self.config, self.use_rollout_log_probs = config, use_rollout_log_probs
        mode = _loss_mode(config.policy_loss)
        self.policy_loss = POLICY_LOSSES.get(mode)
        self.rows_together = 2 if POLICY_LOSSES.facts(mode).pairs else 1
        self.with_reference = names_parameter(self.policy_loss, "ref_log_prob")
        self.scale = config.loss_scale_factor or response_length
        correction = correction_settings(config)
        self.rejects = not correction.bypass_mode and correction.rollout_rs is not None
        self.weight_shares = self._weight_shares if mode == "bypass_mode" and normalises(correction) else None
        self.with_entropy = config.entropy_coeff != 0 or config.calculate_entropy
        self.with_full_kl = config.use_kl_loss and config.kl_loss_type == "full"
        more = {"entropy": self.with_entropy, "full_kl": self.with_full_kl}
        self.outputs = ("log_probs", *(name for name, is_read in more.items() if is_read))

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Fields, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Metric]]:
        mode, mask = self.config.loss_agg_mode, field(batch, "response_mask")
        norm = with_length(norm, self.scale)
        log_prob = zero_outside(outputs["log_probs"], mask)
        loss, metrics = call_policy_loss(
            self.policy_loss,
            old_log_prob=self.old_log_prob(batch, log_prob),
            log_prob=log_prob,
            advantages=field(batch, "advantages"),
            response_mask=mask,
            loss_agg_mode=mode,
            config=self.config,
            norm=norm,
            rollout_is_weights=optional_field(batch, "rollout_is_weights"),
            ref_log_prob=field(batch, "ref_log_prob") if self.with_reference else None,
        )
        pg_mode = aggregation_of(self.policy_loss, mode)
        metrics["pg_loss"] = loss_metric(as_float(loss.detach()), mask, pg_mode, norm)
        if self.with_entropy:
            entropy_loss = agg_loss(outputs["entropy"], mask, mode, norm)
            metrics["entropy_loss"] = loss_metric(as_float(entropy_loss.detach()), mask, mode, norm)
            metrics |= token_means({"entropy": outputs["entropy"]}, mask)
            if self.config.entropy_coeff != 0:
                loss = loss - self.config.entropy_coeff * entropy_loss
        if self.config.use_kl_loss:
            kl = outputs["full_kl"] if self.with_full_kl else self._estimated_kl(batch, log_prob, mask)
            kl_loss = agg_loss(kl, mask, mode, norm)
            metrics["kl_loss"] = loss_metric(as_float(kl_loss.detach()), mask, mode, norm)
            metrics["kl_coef"] = Metric(float(self.config.kl_loss_coef), "last")
            loss = loss + self.config.kl_loss_coef * kl_loss
        if self.config.positive_lm_coef:
            weights = field(batch, "positive_lm_weights")
            # The weights are normalised over the mini-batch already, so the shares are summed.
            nll = agg_loss(-log_prob * weights, mask, "token-sum", norm)
            metrics |= token_means({"positive_nll": -log_prob}, mask * (weights > 0))
            loss = loss + self.config.positive_lm_coef * nll
        if self.measures_log_probs(batch):
            metrics |= current_policy_metrics(log_prob, field(batch, "rollout_log_probs"), mask)
        return loss, metrics

    def slopes_known(self, batch: Fields) -> bool:
        """On policy the ratio is 1 wherever the log-probs are, so that the plain loss is as good as linear in them."""
        alone = not (self.with_entropy or self.config.use_kl_loss)
        on_policy = not self.use_rollout_log_probs and optional_field(batch, "old_log_probs") is None
        return alone and on_policy and _loss_mode(self.config.policy_loss) == "vanilla"

    def _weight_shares(self, log_probs: Tensor, batch: Fields) -> Tensor:
        """Of one micro-batch, as `verl.algorithms.rollout_correction.weight_shares`."""
        mask, how = field(batch, "response_mask"), Correction.of(correction_settings(self.config))
        log_probs = zero_outside(log_probs, mask)
        return weight_shares(log_probs, self.old_log_prob(batch, log_probs), mask, how)

    def measures_log_probs(self, batch: Fields) -> bool:
        """Whether weights or a rejection hold the sampler against the old policy, which this one moves away from."""
        if self.use_rollout_log_probs or optional_field(batch, "rollout_log_probs") is None:
            return False
        return optional_field(batch, "rollout_is_weights") is not None or self.rejects

    def _estimated_kl(self, batch: Fields, log_prob: Tensor, mask: Tensor) -> Tensor:
        return kl_penalty(log_prob, zero_outside(field(batch, "ref_log_prob"), mask), self.config.kl_loss_type)

    def old_log_prob(self, batch: Fields, log_prob: Tensor) -> Tensor:
        """(b, T): the sampler's, those of before the update, or ``log_prob`` itself without a gradient."""
        if self.use_rollout_log_probs:
            return field(batch, "rollout_log_probs")
        old = optional_field(batch, "old_log_probs")
        return log_prob.detach() if old is None else old


def _loss_mode(settings: PolicyLossConfig) -> str:
    """The configured loss; the bypass mode brings its own in place of the default one."""
    correction = settings.rollout_correction
    if correction is None or not correction.bypass_mode:
        return settings.loss_mode
    if settings.loss_mode not in OF_BYPASS_MODE:
        raise ConfigError(
            "the bypass mode brings its own loss (algorithm.rollout_correction.loss_type)",
            key="actor_rollout_ref.actor.policy_loss.loss_mode",
            got=settings.loss_mode,
            allowed=OF_BYPASS_MODE,
            fix="Leave it out, or set algorithm.rollout_correction.bypass_mode=false.",
        )
    return "bypass_mode"


class PPOValueLoss:
    """The critic's objective. Metrics: ``vf_loss``, ``vf_clipfrac``, ``vpred_mean``.

    Args:
        config: the section ``critic``.
        response_length: as in `PPOPolicyLoss`.
    """

    outputs = ("values",)

    def __init__(self, config: CriticConfig, response_length: int | None = None):
        check_agg_mode(config.loss_agg_mode, key="critic.loss_agg_mode")
        self.config = config
        self.scale = config.loss_scale_factor or response_length

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Fields, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Metric]]:
        mode, mask = self.config.loss_agg_mode, field(batch, "response_mask")
        norm = with_length(norm, self.scale)
        vpreds = outputs["values"]
        loss, clipfrac = value_loss(
            vpreds, field(batch, "returns"), field(batch, "values"), mask, self.config.cliprange_value, mode, norm
        )
        metrics = token_means({"vpred_mean": vpreds}, mask)
        metrics["vf_clipfrac"] = Metric(as_float(clipfrac), "mean", metrics["vpred_mean"].weight)
        metrics["vf_loss"] = loss_metric(as_float(loss.detach()), mask, mode, norm)
        return loss, metrics


class SFTLoss:
    """Negative log-likelihood per label token of the mini-batch. Metrics: ``nll``, ``num_tokens`` (a sum)."""

    outputs = ("log_probs",)

    def slopes_known(self, batch: Fields) -> bool:
        """It is linear in the log-probs."""
        return True

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Fields, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask = field(batch, "response_mask")
        loss = agg_loss(-outputs["log_probs"], mask, "token-mean", norm)
        nll = loss_metric(as_float(loss.detach()), mask, "token-mean", norm)
        return loss, {"nll": nll, "num_tokens": Metric(nll.weight, "sum")}


def optional_field(batch: Fields, name: str) -> Tensor | None:
    """A tensor of the micro-batch, or None; a TensorDict answers ``in`` only through its keys."""
    return batch[name] if name in batch.keys() else None


def field(batch: Fields, name: str) -> Tensor:
    """A tensor of the micro-batch that this loss cannot do without."""
    value = optional_field(batch, name)
    if value is None:
        raise DataError(
            f"the loss needs the field {name!r}, which the batch does not have", allowed=sorted(map(str, batch.keys()))
        )
    return value

"""Losses on judged answers: direct preference optimisation, KTO, and the Bradley-Terry loss of reward models.

A batch holds 2 n rows: row 2 i is the chosen answer of pair i, row 2 i + 1 the rejected one. Both must be in one
micro-batch (`rows_together`). Losses are means over the pairs of the whole mini-batch. Shapes: b = 2 m rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algorithms.aggregation import LossNorm
from verl.algorithms.losses import Fields, field, optional_field
from verl.errors import ConfigError
from verl.metrics import Metric, as_float

DPO_LOSSES = ("sigmoid", "ipo", "hinge", "simpo", "orpo", "cpo")
PairFunction = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""Log-probs (m,) of answers: policy chosen, policy rejected, reference chosen, reference rejected -> loss (m,) of each
pair, and what is measured of each (m,)."""
PER_TOKEN = ("simpo", "orpo")
"""Those of them that read log-probs per token."""
WITHOUT_REFERENCE = (*PER_TOKEN, "cpo")
"""Those of them that have no reference policy."""
CERTAIN = -1e-6
"""Log-prob per token above which the odds of an answer are taken as no larger."""
REFERENCE_SUMS = "ref_sums"
"""(b,) log-probability of each answer under the reference policy."""
MARGIN = "margin"
LABEL = "label"
"""(b,) whether an answer is desirable."""
KL_POINT = "kl_point"
"""(b,) KTO's reference point, one number for the batch."""


def dpo_loss(
    margin: Tensor, beta: float, kind: str = "sigmoid", label_smoothing: float = 0.0, gamma: float = 0.0
) -> Tensor:
    """Loss of each pair (m,) from ``margin`` h = [log pi(y_w) - log pi(y_l)] - [log ref(y_w) - log ref(y_l)].

    sigmoid (Rafailov et al. 2023, arXiv 2305.18290), with smoothing e that of cDPO:
    ``-(1 - e) log s(beta h) - e log s(-beta h)``; ipo (Azar et al. 2023, arXiv 2310.12036): ``(h - 1 / (2 beta))^2``;
    hinge (Zhao et al. 2023, arXiv 2305.10425): ``max(0, 1 - beta h)``; simpo (Meng et al. 2024, arXiv 2405.14734), with
    h of log-probs per token and without reference: ``-log s(beta h - gamma)``; cpo (Xu et al. 2024, arXiv 2401.08417):
    sigmoid without reference.
    """
    if kind == "ipo":
        return (margin - 1 / (2 * beta)).square()
    if kind == "hinge":
        return torch.relu(1 - beta * margin)
    if kind == "simpo":
        return -F.logsigmoid(beta * margin - gamma)
    assert kind in ("sigmoid", "cpo"), f"{kind} is no function of the margin"
    scaled = beta * margin
    return -(1 - label_smoothing) * F.logsigmoid(scaled) - label_smoothing * F.logsigmoid(-scaled)


def odds_ratio_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Loss of each pair (m,) from log-probs per token: ``-log s(log odds(y_w) - log odds(y_l))``, odds p / (1 - p).

    The second term of ORPO (Hong et al. 2024, arXiv 2403.07691, equation 7).
    """

    def log_odds(log_probs: Tensor) -> Tensor:
        # 1 - p as -expm1(log p): near certainty 1 - exp(log p) has no digits left.
        return log_probs - torch.log(-torch.expm1(log_probs.clamp(max=CERTAIN)))

    return -F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, centering: float = 0.0
) -> Tensor:
    """Loss of each pair (m,): ``-log s(r_w - r_l - margin) + centering (r_w + r_l)^2``.

    Ouyang et al. 2022 (arXiv 2203.02155), margin of Touvron et al. 2023 (arXiv 2307.09288), centring of Eisenstein
    et al. 2023 (arXiv 2312.09244).
    """
    return -F.logsigmoid(chosen - rejected - margin) + centering * (chosen + rejected).square()


def answer_sums(log_probs: Tensor, mask: Tensor, mean: bool = False) -> Tensor:
    """(b,) log-probability of each answer from those of its tokens (b, T); ``mean``: per token."""
    sums = torch.where(mask.bool(), log_probs, 0.0).sum(-1)
    return sums / mask.sum(-1).clamp(min=1) if mean else sums


class DPOLoss:
    """Metrics: ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins``, ``rewards/accuracies`` (h > 0),
    ``logps/chosen``, ``logps/rejected``, and ``nll`` with ``sft_coef``; a reward is ``beta (log pi - log ref)``.

    orpo is ``nll + beta odds_ratio_loss``. The negative log-probability per token of the chosen answer, nll, may be
    added to every loss (RPO, Pang et al. 2024, arXiv 2404.19733); CPO, whose paper sums it over the tokens, has it with
    weight 1.

    Args:
        beta: strength of the reference policy.
        kind: of `DPO_LOSSES`.
        label_smoothing: share of pairs that are taken to be labelled the wrong way round (sigmoid, cpo).
        length_normalised: log-probabilities per token instead of per answer.
        reference_free: the reference policy gives every answer the same probability.
        gamma: margin by which a reward is to be larger (simpo).
        sft_coef: weight of nll; None: 1 for orpo and cpo, else 0.
        function: a user's loss of pairs in place of ``kind``, and its name for messages.
    """

    outputs = ("log_probs",)
    rows_together = 2

    def __init__(
        self,
        beta: float = 0.1,
        kind: str = "sigmoid",
        label_smoothing: float = 0.0,
        length_normalised: bool = False,
        reference_free: bool = False,
        gamma: float = 0.0,
        sft_coef: float | None = None,
        function: tuple[str, PairFunction] | None = None,
    ):
        if kind not in DPO_LOSSES:
            raise ConfigError("unknown loss of pairs", key="dpo.loss_type", got=kind, allowed=DPO_LOSSES)
        self.beta, self.kind, self.label_smoothing, self.gamma = beta, kind, label_smoothing, gamma
        self.length_normalised = length_normalised or kind in PER_TOKEN
        self.reference_free = reference_free or kind in WITHOUT_REFERENCE
        self.sft_coef = float(kind in ("orpo", "cpo")) if sft_coef is None else sft_coef
        self.function = function

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Fields, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask = field(batch, "response_mask")
        policy = answer_sums(outputs["log_probs"], mask, self.length_normalised)
        reference = torch.zeros_like(policy)
        if not self.reference_free:
            reference = field(batch, REFERENCE_SUMS).to(policy)
            if self.length_normalised:
                reference = reference / mask.sum(-1).clamp(min=1)
        rewards = self.beta * (policy - reference)
        chosen, rejected = rewards[0::2], rewards[1::2]
        margin = (policy - reference)[0::2] - (policy - reference)[1::2]
        of_user: Mapping[str, Tensor] = {}
        if self.function is not None:
            four = (policy[0::2], policy[1::2], reference[0::2], reference[1::2])
            loss, of_user = call_pair_function(*self.function, *four)
        elif self.kind == "orpo":
            loss = self.beta * odds_ratio_loss(policy[0::2], policy[1::2])
        else:
            loss = dpo_loss(margin, self.beta, self.kind, self.label_smoothing, self.gamma)
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (margin > 0).float(),
            "logps/chosen": policy[0::2],
            "logps/rejected": policy[1::2],
            **of_user,
        }
        if self.sft_coef:
            nll = -answer_sums(outputs["log_probs"], mask, mean=True)[0::2]
            loss, metrics = loss + self.sft_coef * nll, {**metrics, "nll": nll}
        return over_pairs(loss, norm), {name: pair_mean(values) for name, values in metrics.items()}


def call_pair_function(name: str, function: PairFunction, *four: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """A user's loss of pairs, with its answer checked.

    Raises:
        ConfigError: it returns something else than a loss (m,) and metrics (m,) by name. What it raises is not caught.
    """
    pairs, answer = four[0].shape, function(*four)
    allowed = f"a loss of shape {tuple(pairs)}, one for each pair, and a dict of metrics of that shape"
    loss, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    shapes = {"loss": loss, **metrics} if isinstance(metrics, Mapping) else {"loss": loss, "metrics": metrics}
    got = {
        key: tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for key, value in shapes.items()
    }
    if any(shape != tuple(pairs) for shape in got.values()):
        raise ConfigError(f"{name} returns other shapes", key="dpo.loss_fn", got=got, allowed=allowed)
    return loss, {str(key): value for key, value in metrics.items()}


def kto_loss(
    log_ratio: Tensor, desirable: Tensor, kl_point: Tensor, beta: float, weights: tuple[float, float] = (1.0, 1.0)
) -> Tensor:
    """Loss (m,) of each answer from ``log_ratio`` r = log pi(y) - log ref(y), and the reference point z.

    Ethayarajh et al. 2024 (KTO, arXiv 2402.01306): ``w_d (1 - s(beta (r - z)))`` of desirable answers,
    ``w_u (1 - s(beta (z - r)))`` of the others, with ``weights`` (w_d, w_u).
    """
    gain = beta * (log_ratio - kl_point)
    return torch.where(desirable, weights[0] * torch.sigmoid(-gain), weights[1] * torch.sigmoid(gain))


class KTOLoss:
    """Metrics: ``rewards/chosen`` and ``logps/chosen`` over desirable answers, ``.../rejected`` over the others, and
    ``kl``, the reference point; a reward is ``beta (log pi - log ref)``.

    Args:
        beta: strength of the reference policy.
        weights: of desirable and of undesirable answers.
    """

    outputs = ("log_probs",)
    reference_free = False

    def __init__(self, beta: float = 0.1, weights: tuple[float, float] = (1.0, 1.0)):
        self.beta, self.weights = beta, weights

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Fields, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Metric]]:
        policy = answer_sums(outputs["log_probs"], field(batch, "response_mask"))
        ratio, desirable = policy - field(batch, REFERENCE_SUMS).to(policy), field(batch, LABEL).bool()
        point = field(batch, KL_POINT).to(policy)
        losses = kto_loss(ratio, desirable, point, self.beta, self.weights)
        measured = {"kl": point}
        for name, rows in (("chosen", desirable), ("rejected", ~desirable)):
            if rows.any():  # a mean over no answer is no number
                measured |= {f"rewards/{name}": self.beta * ratio[rows], f"logps/{name}": policy[rows]}
        loss = losses.sum() * norm.dp_size / norm.num_sequences
        return loss, {name: pair_mean(values) for name, values in measured.items()}


class RewardModelLoss:
    """Metrics: ``accuracy`` (chosen above rejected), ``margin``, ``score/chosen``, ``score/rejected``.

    The score of an answer is the value at the only position of its mask (behind its last token).

    Args:
        centering: weight of the squared sum of both scores, which keeps scores around zero.
    """

    outputs = ("values",)
    rows_together = 2

    def __init__(self, centering: float = 0.0):
        self.centering = centering

    def __call__(
        self, outputs: Mapping[str, Tensor], batch: Fields, norm: LossNorm
    ) -> tuple[Tensor, dict[str, Metric]]:
        scores = answer_sums(outputs["values"], field(batch, "response_mask"))
        chosen, rejected = scores[0::2], scores[1::2]
        margin = optional_field(batch, MARGIN)
        loss = bradley_terry_loss(chosen, rejected, 0.0 if margin is None else margin[0::2].to(scores), self.centering)
        metrics = {
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "score/chosen": chosen,
            "score/rejected": rejected,
        }
        return over_pairs(loss, norm), {name: pair_mean(values) for name, values in metrics.items()}


def over_pairs(losses: Tensor, norm: LossNorm) -> Tensor:
    """This micro-batch's share of the mean over all pairs of the mini-batch, times the number of ranks."""
    return losses.sum() * norm.dp_size / (norm.num_sequences / 2)


def pair_mean(values: Tensor) -> Metric:
    """A mean over pairs that merges over micro-batches and ranks by their number."""
    return Metric(as_float(values.detach().mean()), "mean", float(len(values)))

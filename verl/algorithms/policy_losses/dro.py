"""Direct reward optimization (https://arxiv.org/abs/2405.19107). Shapes: b rows, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.config.schema.actor import ActorConfig
from verl.errors import ConfigError


@policy_loss()
def dro(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """A policy gradient that a square pulls back to the old policy, (b, T).

    With d the log-ratio, A the advantage, beta = policy_loss.dro_beta > 0::

        x = -(A log_prob - beta / 2 d^2)
    """
    return dro_beta(config) / 2 * tokens.log_ratio**2 - tokens.advantages * tokens.log_prob, {}


def dro_beta(config: ActorConfig | None) -> float:
    """The weight of the square; it has no default."""
    beta = None if config is None else config.policy_loss.dro_beta
    if beta is None or not beta > 0:
        raise ConfigError(
            "the policy loss dro weighs the squared log-ratio with a number of yours",
            key="actor_rollout_ref.actor.policy_loss.dro_beta",
            got=beta,
            allowed="above 0",
        )
    return float(beta)

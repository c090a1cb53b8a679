"""REINFORCE (Williams, https://doi.org/10.1007/BF00992696) with importance weights from outside.

Shapes: b rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.config.schema.actor import ActorConfig


@policy_loss(agg_mode="seq-mean-token-sum")
def reinforce(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """``x = -A log_prob``, (b, T), times the constant weights that every loss is multiplied by; no ratio and no clip.

    Without a configured aggregation it is seq-mean-token-sum, the gradient of the expected return of a response.
    """
    return -tokens.advantages * tokens.log_prob, {}

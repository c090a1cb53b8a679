"""REINFORCE (Williams, 1992) with importance weights from outside."""

from __future__ import annotations

from typing import Any

from verl.algorithms.policy_losses.kernel import Block, Terms, policy_loss


@policy_loss(agg_mode="seq-mean-token-sum")
def reinforce(block: Block, config: Any) -> Terms:
    """``x = -A log_prob w`` with constant weights w, no ratio and no clip; ``dx / dlog_prob = -A w``.

    Without a configured aggregation it is seq-mean-token-sum, the gradient of the expected return of a response.
    """
    return Terms(None, block.advantages.neg_())

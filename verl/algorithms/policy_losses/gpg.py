"""Group policy gradient (arXiv 2504.02546)."""

from __future__ import annotations

from typing import Any

from verl.algorithms.policy_losses.kernel import Block, Terms, policy_loss


@policy_loss()
def gpg(block: Block, config: Any) -> Terms:
    """The plain policy gradient: ``x = -A log_prob``, without ratio and clip; ``dx / dlog_prob = -A``."""
    return Terms(None, block.advantages.neg_())

"""Group sequence policy optimization (arXiv 2507.18071)."""

from __future__ import annotations

from typing import Any

import torch

from verl.algorithms.policy_losses.clip import Clip
from verl.algorithms.policy_losses.kernel import Block, Terms, policy_loss

LOG_SEQUENCE_RATIO_BOUND = 10.0


@policy_loss(forced_agg_mode="seq-mean-token-mean")
def gspo(block: Block, config: Any) -> Terms:
    """PPO's clip on the ratio of a whole sequence, normalised by its length.

    With n the valid tokens of a row, A the advantage of a token::

        s = exp(mean of log_ratio over the row)
        x = max(-A s, -A clip(s, 1 - low, 1 + high)),        aggregated as seq-mean-token-mean
        dx / dlog_prob = -A s       where the clip does not hold, else 0    (the token form: the mean over a row of
                                                                             equal advantages has slope -A s / n)

    Settings: clip_ratio_low and clip_ratio_high; the paper's are 3e-4 and 4e-4, since a mean moves less than a token.
    """
    clip, cost = Clip.of(config), block.advantages.neg_()
    log_sequence = block.log_ratio.sum(dim=-1, keepdim=True) / block.lengths
    ratio = log_sequence.clamp(max=LOG_SEQUENCE_RATIO_BOUND).exp()
    clipped = torch.mul(cost, ratio.clamp(1 - clip.low, 1 + clip.high), out=block.log_ratio)
    plain = cost.mul_(ratio)
    is_plain = torch.ge(plain, clipped, out=block.spare())
    loss = torch.maximum(plain, clipped, out=clipped)
    sums = {"pg_clipfrac": plain.numel() - is_plain.sum()}
    bounded = (log_sequence < LOG_SEQUENCE_RATIO_BOUND).to(plain.dtype)
    return Terms(loss, plain.mul_(is_plain).mul_(bounded), sums)

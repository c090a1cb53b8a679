"""Group sequence policy optimization (https://arxiv.org/abs/2507.18071). Shapes: b rows, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algorithms.policy_losses.base import Tokens, policy_loss
from verl.algorithms.policy_losses.clip import Clip
from verl.config.schema.actor import ActorConfig

LOG_SEQUENCE_RATIO_BOUND = 10.0


@policy_loss(forced_agg_mode="seq-mean-token-mean")
def gspo(tokens: Tokens, config: ActorConfig | None) -> tuple[Tensor, Mapping[str, Tensor]]:
    """PPO's clip on the ratio of a whole sequence, normalised by its length; (b, T) in the paper's token form.

    With A the advantage and d the log-ratio of a token::

        s = exp(mean of d over the row)        its gradient through a token is s, that of the row's mean is s / n
        x = max(-A s, -A clip(s, 1 - low, 1 + high)),        aggregated as seq-mean-token-mean

    Settings: clip_ratio_low and clip_ratio_high; the paper's are 3e-4 and 4e-4, since a mean moves less than a token.
    """
    clip, cost = Clip.of(config), -tokens.advantages
    log_sequence = tokens.row_mean(tokens.log_ratio).detach() + tokens.zero
    ratio = log_sequence.clamp(max=LOG_SEQUENCE_RATIO_BOUND).exp()
    plain, clipped = cost * ratio, cost * ratio.clamp(1 - clip.low, 1 + clip.high)
    return torch.maximum(plain, clipped), {"pg_clipfrac": clipped > plain}

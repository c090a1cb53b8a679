"""The rollout correction under the path and the names that users' code and recipes import from upstream."""

from verl.compat.forms.rollout_correction import (
    apply_bypass_mode,
    compute_is_metrics,
    compute_offpolicy_metrics,
    compute_rollout_corr_metrics_from_logprobs,
    compute_rollout_correction_and_add_to_batch,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    compute_rs_metrics,
)

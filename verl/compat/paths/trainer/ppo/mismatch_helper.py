"""Rollout importance sampling under the path and the names of the framework that introduced it."""

from verl.compat.forms.rollout_correction import compute_mismatch_is_metrics as compute_is_metrics
from verl.compat.forms.rollout_correction import compute_mismatch_metrics, compute_rollout_importance_weights

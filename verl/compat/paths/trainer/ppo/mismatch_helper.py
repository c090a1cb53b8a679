"""Rollout importance sampling under the path and the names of the framework that introduced it."""

from verl.algorithms.rollout_correction.upstream_forms import compute_mismatch_is_metrics as compute_is_metrics
from verl.algorithms.rollout_correction.upstream_forms import compute_mismatch_metrics
from verl.trainer.ppo.correction import compute_rollout_importance_weights

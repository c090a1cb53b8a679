"""Correction of the gap between the policy that sampled a batch and the policy that learns from it.

`weights` bounds importance weights, `rejection` takes tokens and sequences out of the mask, `mismatch` and
`weight_metrics` measure, `correction` puts them together. All of it is pure: tensors in, tensors and numbers out.
"""

from verl.algorithms.rollout_correction.correction import (
    Correction,
    CorrectionResult,
    correction_of,
    importance_sampling_of,
    weight_shares,
)
from verl.algorithms.rollout_correction.mismatch import off_policy_metrics

__all__ = [
    "Correction",
    "CorrectionResult",
    "correction_of",
    "importance_sampling_of",
    "off_policy_metrics",
    "weight_shares",
]

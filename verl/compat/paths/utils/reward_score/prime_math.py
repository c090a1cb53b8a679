"""The grader of the Numina family under upstream's import path, with upstream's three results."""

from verl.rewards.scorers.numina import compute_verdict as compute_score

"""Options of TinyLLaVA-Video-R1 under upstream's import path."""

from verl.rewards.scorers.tagged import same_option as compute_score

"""How far the sampler's probabilities are from the trainer's, under upstream's path."""

from verl.trainer.ppo.correction import rollout_difference as calculate_debug_metrics

"""What a sampler answers, under upstream's path."""

from verl.rollout.base import Completion as TokenOutput

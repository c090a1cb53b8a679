"""Upstream's workers over any engine."""

from verl.compat import absent_names
from verl.workers import ActorRolloutRefWorker, TrainingWorker

__getattr__ = absent_names(__name__)

"""Metrics of several places as one number, under upstream's path."""

from verl.metrics import Metric
from verl.trainer.ppo.metric_utils import reduce_metrics

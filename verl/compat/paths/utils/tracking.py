"""Upstream's import path of the trackers."""

from verl.observability.samples import ValidationGenerationsLogger
from verl.observability.tracking import Tracking

"""Upstream's profilers under their path."""

from verl.observability.by_hand import DistProfiler, DistProfilerExtension, Profiler

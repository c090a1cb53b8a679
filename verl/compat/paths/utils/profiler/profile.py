"""Upstream's profilers under their path."""

from verl.compat.forms.profiling import DistProfiler, DistProfilerExtension, Profiler

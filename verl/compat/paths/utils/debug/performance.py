"""Upstream's older path of the timers and memory logs."""

from verl.utils.profiler.performance import *

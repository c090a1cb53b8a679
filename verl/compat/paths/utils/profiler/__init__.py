"""Timers, memory logs and the profiler under upstream's path."""

from verl.utils.profiler.config import ProfilerConfig
from verl.utils.profiler.performance import (
    GPUMemoryLogger,
    log_gpu_memory_usage,
    marked_timer,
    reduce_timing,
    simple_timer,
)
from verl.utils.profiler.profile import DistProfiler, DistProfilerExtension, Profiler

"""Upstream's older path of the timers and memory logs."""

from verl.utils.profiler.performance import GPUMemoryLogger, log_gpu_memory_usage, marked_timer, simple_timer

"""Seconds and memory of a piece of code, under upstream's path."""

from verl.compat.forms.profiling import (
    GPUMemoryLogger,
    gather_timing,
    log_gpu_memory_usage,
    marked_timer,
    reduce_timing,
    simple_timer,
    topk_reduce_ratio_min_max,
)

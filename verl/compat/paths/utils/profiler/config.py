"""The profiler's section under upstream's path."""

from verl.config import ProfilerConfig

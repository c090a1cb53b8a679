"""Upstream's marks for traces of a rollout."""

from verl.observability.user_traces import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op

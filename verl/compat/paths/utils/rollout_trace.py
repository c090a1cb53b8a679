"""Upstream's marks for traces of a rollout."""

from verl.compat.forms.traces import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op

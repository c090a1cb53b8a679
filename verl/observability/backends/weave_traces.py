"""Traces in Weave: one call tree per conversation, with its attributes to filter by."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from verl.observability.traced_call import TraceBackend, TracedCall, trace_package


class WeaveTraces(TraceBackend):
    """Weave's own settings apply (WANDB_API_KEY, WEAVE_*)."""

    def __init__(self, project: str, experiment: str):
        super().__init__(project, experiment)
        with trace_package("weave"):
            import weave
        self._weave = weave

    def write(self, trace: TracedCall) -> None:
        if self.client is None:
            self.client = self._weave.init(self.project)
        self._write(trace, None, trace.attributes)
        self.client.flush()

    def _write(self, call: TracedCall, parent: Any, attributes: dict[str, Any]) -> None:
        begun = self.client.create_call(
            call.name,
            call.inputs,
            parent=parent,
            attributes={**attributes, "kind": call.kind},
            use_stack=False,
            started_at=_moment(call.begin),
        )
        for inner in call.calls:
            self._write(inner, begun, {})
        error = RuntimeError(call.error) if call.error else None
        self.client.finish_call(begun, output=call.outputs, exception=error, ended_at=_moment(call.end))


def _moment(nanoseconds: int) -> datetime:
    return datetime.fromtimestamp(nanoseconds / 1e9, tz=UTC)

"""Traces in Trackio: one per conversation, in the run named after the experiment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from verl.observability.backends.trackio import options_of
from verl.observability.traced_call import TraceBackend, TracedCall, trace_package

KINDS = {"llm": "generation", "tool": "tool"}


class TrackioTraces(TraceBackend):
    """Trackio's own settings apply (TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL)."""

    def __init__(self, project: str, experiment: str):
        super().__init__(project, experiment)
        with trace_package("trackio"):
            import trackio
        self.client = trackio
        self._run: Any = None

    def write(self, trace: TracedCall) -> None:
        if self._run is None:
            # Every process that samples writes to the one run.
            names = {"project": self.project, "name": self.experiment}
            self._run = self.client.init(**names, resume="allow", **options_of(self.client.init))
        spans = list(_spans(trace, None, "0"))
        record = self.client.Trace(
            messages=_messages(trace), metadata={"name": trace.name, **trace.attributes}, spans=spans
        )
        self._run.log({f"rollout_trace/{trace.name}": record}, step=trace.attributes.get("step"))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def _messages(trace: TracedCall) -> list[dict[str, Any]]:
    """The conversation: the messages that it began with, and its answer, as text where there is one."""
    raw_prompt = trace.inputs.get("raw_prompt")
    is_chat = isinstance(raw_prompt, list) and all(isinstance(m, dict) and "role" in m for m in raw_prompt)
    messages = list(raw_prompt) if is_chat and raw_prompt else [{"role": "user", "content": _text(trace.inputs)}]
    outputs = trace.outputs if isinstance(trace.outputs, dict) else {"output": trace.outputs}
    answer = trace.error or outputs.get("response_text") or _text(outputs)
    return [*messages, {"role": "assistant", "content": answer}]


def _text(values: Any) -> str:
    return json.dumps(values, ensure_ascii=False)


def _spans(call: TracedCall, parent: str | None, name: str) -> Iterator[dict[str, Any]]:
    span = {
        "id": name,
        "name": call.name,
        "kind": KINDS.get(call.kind, "span"),
        "start_time": _moment(call.begin),
        "end_time": _moment(call.end),
        "status": "error" if call.error else "ok",
        "input": call.inputs,
        "output": call.outputs,
    }
    yield {**span, **({"parent_id": parent} if parent else {}), **({"error": call.error} if call.error else {})}
    for number, inner in enumerate(call.calls):
        yield from _spans(inner, name, f"{name}.{number}")


def _moment(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, tz=UTC).isoformat()

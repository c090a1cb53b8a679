"""Traces in MLflow: one trace per conversation in the experiment named after the project, found by its tags."""

from __future__ import annotations

import logging
import threading
from typing import Any

from verl.observability.traced_call import TraceBackend, TracedCall, trace_package

KINDS = {"agent": "AGENT", "llm": "LLM", "tool": "TOOL"}


class MlflowTraces(TraceBackend):
    """MLflow's own MLFLOW_TRACKING_URI says where; the attributes of a trace are its tags (``tags.step = '1'``)."""

    def __init__(self, project: str, experiment: str):
        super().__init__(project, experiment)
        with trace_package("mlflow", "In the checkout: pip install -e '.[mlflow]'"):
            import mlflow
            from mlflow.environment_variables import MLFLOW_ENABLE_ASYNC_TRACE_LOGGING
        self.client = mlflow
        # Traces are written in a thread of their own already; in MLflow's own one a failure would come after `write`.
        MLFLOW_ENABLE_ASYNC_TRACE_LOGGING.set(False)
        self._experiment: str | None = None
        self._complaints = _Complaints(logging.WARNING)
        logging.getLogger("mlflow.tracing").addHandler(self._complaints)

    def write(self, trace: TracedCall) -> None:
        """Raises RuntimeError where MLflow only logs that it has lost the trace."""
        if self._experiment is None:
            self._experiment = self._open()
        self._complaints.texts.clear()
        self._complaints.thread = threading.get_ident()
        tags = {name: str(value) for name, value in trace.attributes.items() if value is not None}
        self._write(trace, None, {"experiment_id": self._experiment, "tags": tags})
        if self._complaints.texts:
            raise RuntimeError(self._complaints.texts[0])

    def close(self) -> None:
        logging.getLogger("mlflow.tracing").removeHandler(self._complaints)

    def _write(self, call: TracedCall, parent: Any, of_trace: dict[str, Any]) -> None:
        span = self.client.start_span_no_context(
            call.name,
            span_type=KINDS.get(call.kind, "UNKNOWN"),
            parent_span=parent,
            inputs=call.inputs,
            attributes={"error": call.error} if call.error else {},
            start_time_ns=call.begin,
            **of_trace,
        )
        for inner in call.calls:
            self._write(inner, span, {})
        span.end(outputs=call.outputs, status="ERROR" if call.error else "OK", end_time_ns=call.end)

    def _open(self) -> str:
        """The number of the experiment; another process may make it at the same moment."""
        client = self.client.MlflowClient()
        for _ in range(2):
            experiment = client.get_experiment_by_name(self.project)
            if experiment is not None:
                return str(experiment.experiment_id)
            try:
                return str(client.create_experiment(self.project))
            except self.client.MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
        raise RuntimeError(f"the experiment {self.project!r} can neither be made nor read")


class _Complaints(logging.Handler):
    """What MLflow logs where it gives up a trace: it raises nothing."""

    def __init__(self, level: int):
        super().__init__(level)
        self.texts: list[str] = []
        self.thread: int | None = None
        """The one that writes: others may use MLflow for traces of their own."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self.thread:
            self.texts.append(record.getMessage())

"""RL-Insight, whose server shows a run in Grafana; an actor of the run's Ray cluster is what the server asks."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from verl import env
from verl.errors import ConfigError
from verl.observability.tracker import MetricNames, Tracker, scalar_metrics, tracker_package

NAME = "rl_insight"
SERVER = "RL_INSIGHT_SERVER_URL"
_FORBIDDEN = re.compile(r"\W", re.ASCII)


class RlInsightTracker(Tracker):
    """Gauges under the metric's name with ``_`` for what Prometheus refuses, behind the package's prefix:
    ``rl_insight_monitor_critic_score_mean``. Where two metrics would be one, the later is called ``..._2``.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, object] | None = None):
        super().__init__(project_name, experiment_name, config)
        with tracker_package(NAME, "pip install rl-insight"):
            import rl_insight
        ray: Any = sys.modules.get("ray")
        fix = None if env.get(SERVER) else f"Set {SERVER} to the address of its server."
        if ray is None or not ray.is_initialized():
            fix = "Set trainer.runtime=ray: it collects by an actor."
        if fix is not None:
            raise ConfigError("rl_insight would record nothing", key="trainer.logger", got=NAME, fix=fix)
        self._insight: Any = rl_insight
        self._names = MetricNames(lambda key: _FORBIDDEN.sub("_", key))
        rl_insight.init(project=project_name, experiment_name=experiment_name)

    def log(self, data: Mapping[str, object], step: int) -> None:
        for key, value in {**scalar_metrics(data), "step": step}.items():
            self._insight.metric_gauge(self._names.of(key), value, documentation=key)

    def finish(self, exit_code: int = 0) -> None:
        self._insight.finish()

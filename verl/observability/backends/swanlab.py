"""SwanLab. Its own SWANLAB_* variables apply: SWANLAB_MODE, SWANLAB_API_KEY, SWANLAB_LOG_DIR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl import env
from verl.errors import MissingDependencyError
from verl.metrics import notice
from verl.observability.tracker import Sample, Tracker, open_picture, scalar_metrics


class SwanlabTracker(Tracker):
    """One SwanLab run; completions become texts with their score as caption.

    Where no mode is set and SwanLab's servers cannot be used (no key, no network), the run is written to disk in
    its ``offline`` form, which ``swanlab sync <folder>`` uploads later; a notice says so.
    """

    def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any] | None = None):
        super().__init__(project_name, experiment_name, config)
        try:
            import swanlab
        except ImportError as error:
            raise MissingDependencyError(
                "the package swanlab is not installed",
                key="trainer.logger",
                got="swanlab",
                fix="In the checkout: pip install -e '.[swanlab]', or leave 'swanlab' out of trainer.logger.",
            ) from error
        self._swanlab = swanlab
        self.run = self._open(env.get("SWANLAB_MODE"))

    def _open(self, mode: str | None) -> Any:
        options = {"project": self.project_name, "name": self.experiment_name, "config": dict(self.config or {})}
        folder = env.get("SWANLAB_LOG_DIR")
        if folder:
            options["log_dir"] = env.expand(folder)
        if mode:
            return self._swanlab.init(mode=mode, **options)
        try:
            return self._swanlab.init(**options)
        except Exception as error:  # boundary: no key, no network, a server that refuses
            notice(
                "SWANLAB_MODE",
                f"the run is tracked offline, because SwanLab's servers cannot be used ({error}); upload it later "
                "with `swanlab sync <folder>`, or set SWANLAB_API_KEY. SWANLAB_MODE=offline asks for it.",
            )
            return self._swanlab.init(mode="offline", **options)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.run.log(scalar_metrics(data), step=step)

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        texts = [self._swanlab.Text(f"{s.prompt}\n\n{s.response}", caption=_caption(s)) for s in samples]
        pictures = [self._swanlab.Image(open_picture(s.picture), caption=_caption(s)) for s in samples if s.picture]
        if texts:
            self.run.log({title: texts, **({f"{title}/images": pictures} if pictures else {})}, step=step)

    def finish(self, exit_code: int = 0) -> None:
        if exit_code == 0:
            self.run.finish()
        else:
            self.run.finish(state="crashed", error=f"the run ended with exit code {exit_code}")


def _caption(sample: Sample) -> str:
    score = "no score" if sample.score is None else f"score {sample.score:g}"
    return score if sample.ground_truth is None else f"{score}, expected {sample.ground_truth}"

"""Volcengine's machine learning platform, whose tracker has the interface of wandb."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl import env
from verl.config.loading.secrets import hide
from verl.config.rules.checks import ELSEWHERE
from verl.errors import ConfigError
from verl.metrics import notice
from verl.observability.backends.wandb import WandbTracker
from verl.observability.tracker import Sample, tracker_package

ACCESS = {"ak": "VOLC_ACCESS_KEY_ID", "sk": "VOLC_SECRET_ACCESS_KEY", "region": "MLP_TRACKING_REGION"}


class VemlpTracker(WandbTracker):
    """One run there; its keys and the region are taken from the shell."""

    def _begin(self) -> tuple[Any, Any]:
        with tracker_package("vemlp_wandb", ELSEWHERE["volcengine_ml_platform"]):
            import volcengine_ml_platform
            from volcengine_ml_platform import wandb
        access = {word: env.get(name) for word, name in ACCESS.items()}
        if unset := [name for word, name in ACCESS.items() if not access[word]]:
            raise ConfigError(
                f"vemlp_wandb needs variables of the shell: {', '.join(unset)}",
                key="trainer.logger",
                got="vemlp_wandb",
                fix="Set them, or leave 'vemlp_wandb' out.",
            )
        volcengine_ml_platform.init(**access)
        options = {"project": self.project_name, "name": self.experiment_name, "config": hide(self.config or {})}
        wandb.init(**options, sync_tensorboard=True)
        return wandb, wandb

    def log_samples(self, title: str, samples: Sequence[Sample], step: int) -> None:
        needed = ["Table", *(["Image"] if any(sample.picture for sample in samples) else [])]
        if missing := [name for name in needed if not hasattr(self._wandb, name)]:
            notice("vemlp_wandb", f"its module has no {' and no '.join(missing)}: these samples are not sent to it")
            return
        super().log_samples(title, samples, step)

"""Validation: sample the held-out prompts, score them, and report by data source under upstream's metric names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.algorithms.validation import process_validation_metrics
from verl.config import PPOTrainerConfig
from verl.data.loader import give_uids
from verl.data.sample_texts import SampleTexts, add_columns, conversation_columns
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.trainer.ppo.scoring import score_samples
from verl.trainer.ppo.stages import sample
from verl.workers.roles import Roles

CORE = ("mean", "maj", "best", "pass")
VALIDATION_EPOCH = -1  # keeps validation uids, hence their random numbers, separate from those of training


@dataclass
class ValidationSamples:
    """Everything one validation saw, one list entry per sample."""

    inputs: list[str] = field(default_factory=list)
    questions: list[str | None] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ground_truths: list[Any] = field(default_factory=list)
    data_sources: list[str] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)
    infos: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    num_turns: list[float] = field(default_factory=list)
    conversations: dict[str, list[Any]] = field(default_factory=dict)
    pictures: list[bytes | None] = field(default_factory=list)
    """Thumbnails of the images of the first ones, as many as trackers are shown (``trainer.log_val_generations``)."""


class Validator:
    """Validates with fixed prompts and fixed random numbers: two steps differ only by the policy."""

    def __init__(
        self, config: PPOTrainerConfig, loader: Iterable[dict[str, Any]], reward: Callable[..., Any], texts: SampleTexts
    ):
        self.config, self.loader, self.reward, self.texts = config, loader, reward, texts

    def run(self, roles: Roles, step: int) -> tuple[dict[str, float], ValidationSamples]:
        """``val-core/*`` and ``val-aux/*`` metrics, and the samples behind them."""
        seen = ValidationSamples()
        for rows in self.loader:
            self._add_batch(DataProto.from_single_dict(rows), roles, step, seen)
        return self._metrics(seen), seen

    def _add_batch(self, prompts: DataProto, roles: Roles, step: int, seen: ValidationSamples) -> None:
        give_uids(prompts, VALIDATION_EPOCH)
        prompts = prompts.repeat(self.config.actor_rollout_ref.rollout.val_kwargs.n, interleave=True)
        prompts.meta_info = {"validate": True, "global_steps": step}
        samples = sample(prompts, roles["rollout"], MetricSet())
        scored = score_samples(samples, roles, self.reward, MetricSet())
        scores = scored["reward_tensor"].sum(-1).tolist()
        seen.scores += scores
        seen.infos["reward"] += scores
        for name, values in scored.get("reward_extra_info", {}).items():
            seen.infos[name] += list(values)
        prompts_shown, responses_shown = self.texts.of(samples)
        seen.inputs += prompts_shown
        seen.questions += self.texts.questions(samples, prompts_shown)
        seen.outputs += responses_shown
        seen.pictures += self.texts.pictures(samples, self.config.trainer.log_val_generations - len(seen.pictures))
        seen.uids += list(samples.non_tensor_batch["uid"])
        unknown = np.full(len(samples), "unknown", dtype=object)
        sources = samples.non_tensor_batch.get("data_source", unknown)
        seen.data_sources += [source or "unknown" for source in sources]
        truths = samples.non_tensor_batch.get("reward_model", np.full(len(samples), None, dtype=object))
        seen.ground_truths += [truth.get("ground_truth") if isinstance(truth, dict) else None for truth in truths]
        seen.num_turns += [float(turns) for turns in samples.non_tensor_batch.get("__num_turns__", [])]
        columns = {**conversation_columns(samples), **self.texts.columns(samples)}
        add_columns(seen.conversations, columns, len(seen.scores) - len(samples), len(samples))

    def _metrics(self, seen: ValidationSamples) -> dict[str, float]:
        validated: dict[str, float] = {}
        nested = process_validation_metrics(seen.data_sources, seen.uids, dict(seen.infos))
        for source, variables in nested.items():
            core = "acc" if "acc" in variables else "reward"
            for variable, metrics in variables.items():
                largest = max(int(name.split("@")[-1].split("/")[0]) for name in metrics)
                for name, value in metrics.items():
                    is_core = variable == core and f"@{largest}" in name and name.startswith(CORE)
                    validated[f"{'val-core' if is_core else 'val-aux'}/{source}/{variable}/{name}"] = value
        validated |= _spread("val-aux/num_turns", seen.num_turns)
        validated |= _spread("val-aux/tool_call_counts", seen.conversations.get("tool_call_counts", []))
        return validated


def _spread(name: str, values: list[Any]) -> dict[str, float]:
    """``<name>/min``, ``/max`` and ``/mean`` of the values that are there; nothing if there is none."""
    numbers = np.array([value for value in values if value is not None], dtype=float)
    if not len(numbers):
        return {}
    return {f"{name}/{k}": float(f(numbers)) for k, f in (("min", np.min), ("max", np.max), ("mean", np.mean))}

"""Warnings about runs that cannot learn: a sign that holds for some steps in a row is reported once.

Each sign is a sentence on what was seen, the likely cause, and where to look. A sign that follows from another one of
the same step (no gradient where all rewards are equal) is not reported with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from verl.errors import EngineError
from verl.metrics import notice

PATIENCE = 5
"""Consecutive steps; in a shorter run all of its steps, at least `SHORTEST`."""
SHORTEST = 2
MOST_NOT_FINITE = 100
"""Optimizer steps in a row that are skipped for a gradient that is not finite: no weight has moved, and none will."""
MEND = "Look at the loss, the rewards and the weights; a lower rate or float32 may mend it."
SKIPPED = ("skipped_nonfinite_step", "skipped_empty_step", "skipped_overflow_step")


class Watch:
    """Counts for how many steps in a row a sign has held; reports it once.

    Example:
        >>> watch = Watch()
        >>> watch.step({"train/loss": "it is not finite"}); watch.end()
    """

    def __init__(self) -> None:
        self._steps = 0
        self._held: dict[str, int] = {}
        self._told: set[str] = set()
        self._last: Mapping[str, str] = {}

    def step(self, signs: Mapping[str, str]) -> None:
        """The signs of one step, by the metric or setting to look at first."""
        self._steps += 1
        self._held, self._last = {name: self._held.get(name, 0) + 1 for name in signs}, signs
        for name, steps in self._held.items():
            if steps == PATIENCE:
                self._tell(name)

    def end(self) -> None:
        """The run is over: reports what held for all steps of a short one."""
        for name, steps in self._held.items():
            if SHORTEST <= steps == self._steps < PATIENCE:
                self._tell(name)

    def _tell(self, name: str) -> None:
        if name not in self._told:
            self._told.add(name)
            notice(name, f"for {self._held[name]} steps in a row {self._last[name]}")


class Updates:
    """Counts the optimizer steps of each model; one whose every step was skipped has learned nothing."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()
        self._not_finite: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()

    def add(self, model: str, metrics: Mapping[str, float]) -> None:
        """One step, by the metrics of `verl.engines.step.StepReport`, under the names that it gives them.

        Raises:
            EngineError: it is one of `MOST_NOT_FINITE` in a row whose gradient was not finite.
        """
        is_not_finite = metrics.get("skipped_nonfinite_step", 0.0) > 0
        self._not_finite[model] += is_not_finite
        self._in_a_row[model] = (self._in_a_row[model] + 1) * is_not_finite
        self._taken[model] += not any(value for name, value in metrics.items() if name in SKIPPED)
        if self._in_a_row[model] >= MOST_NOT_FINITE:
            raise EngineError(
                f"the last {MOST_NOT_FINITE} optimizer steps of the {model} were skipped because the gradient was not "
                "finite",
                fix=f"{MEND} The log names the rows whose loss was not finite.",
            )

    def check(self) -> None:
        """Raises `EngineError` where no step was taken, and some would not have been finite."""
        for model, count in self._not_finite.items():
            if count and not self._taken[model]:
                raise EngineError(
                    f"nothing was trained: all optimizer steps of the {model} were skipped, {count} of them because "
                    "the gradient was not finite",
                    fix=MEND,
                )


def signs_of_supervised(metrics: Mapping[str, float], before: float | None, trained_tokens: int) -> dict[str, str]:
    """The same of a step of supervised training.

    Args:
        metrics: of the step (``train/...``).
        before: the loss of the step before.
        trained_tokens: tokens of the batch that the loss counts.
    """
    if not trained_tokens:
        return {
            "loss_mask": "no token of the batch was trained on. No message of the assistant is marked: the chat "
            "template, data.messages_key and data.max_length (answers cut off) decide which tokens are"
        }
    loss, norm = metrics["train/loss"], metrics.get("train/grad_norm")
    if not math.isfinite(loss):
        return {"train/loss": "the loss was not finite. A lower optim.lr, or float32 (model.dtype), mostly mend it"}
    if metrics.get("train/lr") == 0.0:
        return {"train/lr": "the learning rate was 0, so no weight has moved: look at optim"}
    if norm == 0.0:
        return {"train/grad_norm": "the gradient was 0, so no weight has moved: the loss does not reach the weights"}
    if before is not None and loss == before:
        return {"train/loss": f"the loss was {loss:g} to the last digit, so nothing is learnt: are all rows the same?"}
    return {}

"""The reward of FAPO's generative reward model while it learns: the right verdict, less the distance to the error.

R = R_outcome + R_process [2510.22543]. R_outcome is 1 where the reply says rightly whether the solution has an error,
else -1. Where both say that it has one, R_process = -|t - t*| / n for the index t of the reply, the true one t* and n
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipe.fapo.critique import NO_ERROR, error_index
from verl.errors import DataError


def compute_score_fapo_genrm(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The reward of a review, from -1 to 1.

    Args:
        solution_str: the review.
        ground_truth: index of the first step with an error, -1: there is none.
        extra_info: ``total_steps`` of the reviewed solution.

    Returns:
        ``score``; ``acc``: the verdict is right; ``pred``: the index of the reply, or ``[INVALID]``.

    Raises:
        DataError: no number of steps, or a ground truth that is no index of one.
    """
    total = (extra_info or {}).get("total_steps")
    steps, truth = _integer(total), _integer(ground_truth)
    if steps is None or steps < 1:
        raise DataError("not a number of steps", key="extra_info.total_steps", got=total, allowed="1 or more")
    if truth is None or not NO_ERROR <= truth < steps:
        allowed = f"-1 (no error) to {steps - 1}"
        raise DataError("no index of a step", key="ground_truth", got=ground_truth, allowed=allowed)
    index = error_index(solution_str, steps)
    if index is None:
        return {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    is_right = (index == NO_ERROR) == (truth == NO_ERROR)
    score = 1.0 - abs(index - truth) / steps if is_right else -1.0
    return {"score": score, "acc": is_right, "pred": str(index)}


def _integer(value: object) -> int | None:
    return int(str(value)) if str(value).removeprefix("-").isdecimal() else None

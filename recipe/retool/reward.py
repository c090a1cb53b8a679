"""The reward of ReTool: the answer in a box is right or wrong; a wrong one that used the interpreter is less wrong.

The bonus keeps the model trying to compute while it is still mostly wrong; it never makes a wrong answer as good as a
right one. It is the form of upstream's recipe; the paper itself rewards the answer alone (``call_bonus=0``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.rewards.scorers.math_dapo import compute_score as grade

BEST_WRONG = -0.6


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    call_bonus: float = 0.1,
) -> dict[str, Any]:
    """``{"score", "acc", "pred", "calls"}``: 1 for a right answer, from -1 to -0.6 for a wrong one.

    Args:
        solution_str: the whole response, tool answers included; the last box counts.
        extra_info: ``num_turns`` counts the prompt, the model's turns and the tools': 2 are an answer without a call.
        call_bonus: what each call adds to a wrong answer.
    """
    result = dict(grade(solution_str, ground_truth, strict_box_verify=True))
    turns = int((extra_info or {}).get("num_turns") or 2)
    calls = max(turns - 2, 0) / 2
    if result["score"] < 0:
        result["score"] = min(BEST_WRONG, result["score"] + call_bonus * calls)
    return {**result, "pred": result["pred"] or "", "calls": calls}

"""The rule reward of the calculator example: what the model says last is the product, or it is not."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None):
    """1.0 where the model's last answer is the product, else 0.0; ``called`` says whether it used the calculator.

    ``solution_str`` is the whole response: calls, what the tool answered, and the model's last answer. So after a call
    the number stands there twice, once as the tool's and once as the model's.
    """
    called = "</tool_call>" in solution_str
    rest = solution_str.rsplit("</tool_call>", 1)[-1]
    return {"score": float(rest == ground_truth * (2 if called else 1)), "called": float(called)}

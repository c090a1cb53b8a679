"""What runs in the process of `math_verify`."""

from __future__ import annotations

import logging

from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that it keeps no time itself
READERS = (LatexExtractionConfig(boxed_match_priority=0),)


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 if the answer is equal to the truth, else 0.0. No time limit of its own: the process has one."""
    truth = parse(rf"\boxed{{{ground_truth}}}", extraction_config=READERS, parsing_timeout=None)
    answer = parse(solution_str, extraction_config=READERS, parsing_timeout=None)
    return float(bool(truth) and bool(answer) and verify(truth, answer, timeout_seconds=None))

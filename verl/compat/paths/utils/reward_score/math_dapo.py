"""DAPO and AIME under upstream's import path."""

from collections.abc import Sequence

from verl.rewards.scorers.math_dapo import compute_score, normalize_final_answer
from verl.rewards.scorers.text import last_braced
from verl.utils.reward_score.math_reward import remove_boxed


def last_boxed_only_string(string: str) -> str | None:
    r"""The last ``\boxed{...}`` with its command; None without one."""
    inside = last_braced(string, r"\boxed")
    return None if inside is None else rf"\boxed{{{inside}}}"


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: Sequence[int] | None = None
) -> tuple[bool, str]:
    """(whether it is right, the answer that was read)."""
    scored = compute_score(solution_str, answer, strict_box_verify, pause_tokens_index)
    return scored["acc"], scored["pred"]


def is_correct_minerva(solution_str: str, gt: str) -> tuple[bool, str]:
    """`verify` by the line ``Answer: ...``."""
    return verify(solution_str, gt)

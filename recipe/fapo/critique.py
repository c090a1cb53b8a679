r"""What FAPO asks of its generative reward model: the first step of a solution that has an error, in a box.

Steps are the paragraphs of a solution, numbered from 0; -1 says that none has an error. The form of the reply,
``\boxed{index}``, is that of the paper's reward model, FAPO-GenRM-4B.
"""

from __future__ import annotations

import re

from verl.rewards.judges.verdicts import RULES, fenced, tag_of
from verl.rewards.scorers.math_boxed import last_boxed

NO_ERROR = -1
INDEX = re.compile(r"-1|[0-9]{1,6}")
BLANK_LINES = re.compile(r"\n\s*\n")


def steps_of(solution: str) -> list[str]:
    """The paragraphs of a solution; an empty one is one empty step."""
    return [part.strip() for part in BLANK_LINES.split(solution) if part.strip()] or [""]


def critique_prompt(question: str, solution: str, ground_truth: object) -> str:
    """The request to the reward model; also the prompt of the rows on which it is trained."""
    tag = tag_of(question, solution)
    numbered = "\n\n".join(f"Step {index}:\n{step}" for index, step in enumerate(steps_of(solution)))
    return "\n\n".join([
        f"Review the solution of a problem, step by step. {RULES}",
        fenced("problem", question, tag),
        f"The right final answer is: {ground_truth}",
        fenced("solution", numbered, tag),
        "A right final answer proves no step: a guess and a jump to the result are errors, too. Reason about each "
        "step in turn. Then write the index of the first step with an error, or -1 if none has one, in \\boxed{}, "
        "at the end of your reply.",
    ])  # fmt: skip


def error_index(reply: str, steps: int) -> int | None:
    """The index in the last box of a reply, -1 to ``steps`` - 1; None where no box has one."""
    inside = (last_boxed(reply) or "").strip()
    index = int(inside) if INDEX.fullmatch(inside) else None
    return index if index is not None and index < steps else None

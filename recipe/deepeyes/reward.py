"""The reward of DeepEyes: a right answer, its form, and the use of the tool where the answer is right.

R = 0.8 acc + 0.2 format + 1.2 tool: acc is 0 or 1, format 0 or -1, and tool 1 for a right answer of a conversation in
which the tool has shown an image. These weights are those of the paper's published code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.errors import DataError
from verl.rewards.judges import rubric_score, shared_client

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LONGEST = 1000
"""Characters of an answer; a longer one is an attempt at the judge."""
AGREES = "The answer says the same as the reference answer, which is: {ground_truth}"


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    reward_router_address: str | None = None,
    address: str | None = None,
    model: str = "judge",
    timeout: float = 25.0,
    acc_weight: float = 0.8,
    format_weight: float = 0.2,
    tool_weight: float = 1.2,
) -> dict[str, float]:
    """The reward of a conversation.

    Args:
        solution_str: the response with the tool's answers; the last turn counts.
        extra_info: ``tool_rewards``, which the run adds: one for each image that the tool has shown. ``question`` is
            for the judge.
        reward_router_address: of a judge that the run starts itself; ``address`` comes first. Without a judge an answer
            is right if it equals the ground truth, but for case and spaces around it.
        model, timeout: of the judge; seconds for a reply.
        acc_weight, format_weight, tool_weight: of the sum above.

    Returns:
        ``score``, ``acc``, ``format``, ``tool``.

    Raises:
        DataError: a judge, and no question. JudgeError: the judge cannot be used.
    """
    info = extra_info or {}
    answers = ANSWER.findall(solution_str.rpartition("</tool_call>")[2])
    is_formed = len(answers) == 1 and len(answers[0]) < LONGEST
    answer = answers[0].strip() if is_formed else ""
    accuracy = float(bool(answer) and answer.casefold() == str(ground_truth).strip().casefold())
    judge = address or reward_router_address
    if answer and not accuracy and judge:
        question = info.get("question")
        if not isinstance(question, str):
            raise DataError("a judge reads the question", key="extra_info.question", got=question)
        item = AGREES.format(ground_truth=ground_truth)
        grades = await rubric_score(shared_client(judge, model, timeout=timeout), question, answer, {item: 1.0})
        accuracy = float(grades["score"] > 0.5)
    form = 0.0 if is_formed else -1.0
    tool = float(accuracy > 0 and sum(info.get("tool_rewards") or ()) > 0)
    score = acc_weight * accuracy + format_weight * form + tool_weight * tool
    return {"score": score, "acc": accuracy, "format": form, "tool": tool}

r"""The reward of FAPO [2510.22543]: R = 1 for a right answer, -1 for a wrong one, less a penalty for a flawed positive.

A flawed positive is a right answer in whose reasoning the generative reward model finds an error. With the paper's
penalty of 1 it scores 0: while wrong answers prevail it is better than the mean of its group, and reinforced; once
flawless ones prevail it is worse.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from recipe.fapo.critique import NO_ERROR, critique_prompt, error_index, steps_of
from verl.errors import DataError
from verl.registry import load_object
from verl.rewards.judges import JudgeClient, JudgeVerdictError
from verl.rewards.scorers.math_boxed import last_boxed
from verl.rewards.scorers.math_dapo import NO_ANSWER
from verl.rewards.scorers.math_dapo import compute_score as grade


@dataclass(frozen=True)
class Review:
    """What the reward model says of a right answer; it sees no others.

    A reply without an index of the solution makes an answer flawed, too: to confuse the reward model must not pay.
    """

    is_flawed_positive: float = 0.0
    judge_calls: float = 0.0
    judge_tokens: float = 0.0
    judge_no_verdict: float = 0.0


def compute_score_baseline(data_source: str, solution_str: str, ground_truth: object, **_: object) -> dict[str, Any]:
    r"""``{"score": 1.0 or -1.0, "acc", "pred"}`` by the last ``\boxed{...}``, normalised as DAPO does."""
    boxed = last_boxed(solution_str)
    if boxed is None:
        return {"score": -1.0, "acc": False, "pred": NO_ANSWER}
    return grade(f"Answer: {' '.join(boxed.split())}", ground_truth)


async def compute_score_fapo(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, Any] | None = None,
    reward_router_address: str | None = None,
    address: str | None = None,
    model: str = "judge",
    penalty: float = 1.0,
    outcome: str | None = None,
    timeout: float = 840.0,
    max_tokens: int = 16384,
    budget_calls: int | None = None,
) -> dict[str, Any]:
    r"""The reward of an answer. The reward model reads right answers alone, and none of rows for tests.

    Args:
        extra_info: ``question`` is the problem's text; ``split``: ``test`` is for validation.
        reward_router_address: of a reward model that the run starts itself; ``address`` comes first.
        address: URL of a server with the reward model.
        model: its name there.
        penalty: of a flawed positive; 0: it pays like others.
        outcome: ``pkg.mod:function``, called as `compute_score_baseline`, which it replaces.
        timeout: seconds for a reply, below ``reward.timeout``.
        max_tokens: of a reply.
        budget_calls: most requests of a process.

    Returns:
        ``score``, ``acc``, ``pred``, and the fields of `Review`.

    Raises:
        DataError: a row without a question. JudgeError: the reward model cannot be used.
    """
    info = extra_info or {}
    question, is_test = info.get("question"), info.get("split") == "test"
    if not isinstance(question, str) and not is_test:
        fix = "Add it in the data preparation, as examples/data_preprocess/math_dataset.py does."
        raise DataError("the reward model reads the problem", key="extra_info.question", got=question, fix=fix)
    outcome_score = load_object(outcome) if outcome else compute_score_baseline
    graded = outcome_score(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth)
    if not graded["acc"] or is_test:
        return {**graded, **asdict(Review())}
    client = _shared_client(address or reward_router_address, model, timeout, max_tokens, budget_calls)
    review = await _review(client, str(question), solution_str, ground_truth)
    return {**graded, "score": graded["score"] - penalty * review.is_flawed_positive, **asdict(review)}


@functools.cache
def _shared_client(
    address: str | None, model: str, timeout: float, max_tokens: int, budget_calls: int | None
) -> JudgeClient:
    return JudgeClient(address, model, timeout=timeout, options={"max_tokens": max_tokens}, budget_calls=budget_calls)


async def _review(client: JudgeClient, question: str, solution: str, ground_truth: object) -> Review:
    try:
        reply = await client.ask(critique_prompt(question, solution, ground_truth))
    except JudgeVerdictError as error:
        return Review(1.0, error.calls, error.tokens, 1.0)
    index = error_index(reply.text, len(steps_of(solution)))
    return Review(float(index != NO_ERROR), reply.calls, reply.tokens, float(index is None))

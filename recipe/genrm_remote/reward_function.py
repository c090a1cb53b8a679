"""A reward function that lets a language model behind an OpenAI-compatible server judge answers.

The judge grades each item of a rubric from 0 to 10; the score is their weighted mean, from 0 to 1. A reply without a
verdict, also one that a hostile answer brought about, scores 0. Where the server does not answer, the sample has no
score, and is masked (`reward.on_error`).
"""

from __future__ import annotations

from collections.abc import Mapping

from verl.errors import DataError
from verl.rewards.judges import rubric_score, shared_client

RUBRIC = {"The final answer is {ground_truth}.": 1.0}
"""Item -> weight."""
TRUTH, RIGHT = "{ground_truth}", 0.5


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, object] | None = None,
    reward_router_address: str | None = None,
    address: str | None = None,
    model: str = "judge",
    rubric: Mapping[str, float] | None = None,
    timeout: float = 25.0,
    budget_calls: int | None = None,
) -> dict[str, float]:
    """The judge's opinion of an answer.

    Args:
        extra_info: ``question`` is the prompt's text.
        reward_router_address: of a judge that the run starts itself; ``address`` comes first.
        address: URL of the judge's server.
        model: its name there.
        rubric: item -> weight above 0; ``{ground_truth}`` in an item stands for the answer of the data.
        timeout: seconds for a reply, below ``reward.timeout``.
        budget_calls: most requests of a process.

    Returns:
        ``score``, ``acc`` (1: above one half), and ``judge_*`` of `verl.rewards.judges.rubric_score`.

    Raises:
        DataError: a row without a question. JudgeError: the judge cannot be used.
    """
    question = (extra_info or {}).get("question")
    if not isinstance(question, str):
        fix = "Add it in the data preparation, as examples/data_preprocess/gsm8k.py does."
        raise DataError("a judge reads the question", key="extra_info.question", got=question, fix=fix)
    client = shared_client(address or reward_router_address, model, timeout=timeout, budget_calls=budget_calls)
    items = {item.replace(TRUTH, str(ground_truth)): weight for item, weight in (rubric or RUBRIC).items()}
    graded = await rubric_score(client, question, solution_str, items)
    return {**graded, "acc": float(graded["score"] > RIGHT)}

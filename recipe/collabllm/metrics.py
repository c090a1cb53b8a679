"""What a conversation is worth: functions of a `recipe.collabllm.loop.Conversation`."""

from __future__ import annotations

import functools

from recipe.collabllm.loop import Conversation
from verl.rewards import default_compute_score
from verl.rewards.judges import JudgeClient, rubric_score

INTERACTIVE = "The assistant engages with the user: it asks what is unclear, and helps the user to say what they need."
clients = functools.cache(JudgeClient)


def transcript(conversation: Conversation, first: int = 0) -> str:
    """The messages from number ``first`` on, each with its role."""
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in conversation.messages[first:])


def accuracy(conversation: Conversation) -> float:
    """The score of the last answer by the built-in scorer of the row's ``data_source``."""
    row = conversation.row
    truth = row["reward_model"]["ground_truth"]
    result = default_compute_score(row["data_source"], conversation.answers()[-1], truth)
    return float(result["score"] if isinstance(result, dict) else result)


async def interactivity(
    conversation: Conversation, address: str, model: str = "judge", timeout: float = 25.0, item: str = INTERACTIVE
) -> float:
    """From 0 to 1: how far a judge finds that ``item`` holds of the conversation.

    Args:
        address: of the judge's server.
        timeout: seconds for a reply.
    """
    question = next(str(m["content"]) for m in conversation.messages if m["role"] == "user")
    client = clients(address, model, timeout=timeout)
    return (await rubric_score(client, question, transcript(conversation, 1), {item: 1.0}))["score"]


def token_amount(conversation: Conversation) -> float:
    """The tokens that the policy sampled; its weight is below 0."""
    return float(conversation.tokens)

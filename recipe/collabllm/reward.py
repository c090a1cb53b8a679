"""What a conversation is worth: the recipe's reward of a `recipe.collabllm.loop.Conversation`."""

from __future__ import annotations

from recipe.collabllm.loop import Conversation
from recipe.collabllm.users import key_in, transcript
from verl.rewards import default_compute_score
from verl.rewards.judges import rubric_score, shared_client

INTERACTIVE = "The assistant engages with the user: it asks what is unclear, and helps the user to say what they need."


async def conversation_reward(
    conversation: Conversation,
    address: str,
    model: str = "judge",
    timeout: float = 25.0,
    api_key_env: str | None = None,
    token_price: float = 0.0001,
) -> dict[str, float]:
    """Accuracy, and how far a judge finds the assistant engaged, less a price for tokens of at most 1.

    A price without that bound would pay policies whose answers are cut off, which score -1.

    Args:
        address, model: of the judge.
        timeout: seconds for a reply.
        api_key_env: the environment variable that holds the server's key.
        token_price: of a token that the policy sampled.

    Returns:
        ``score``, accuracy + interactivity - price; ``accuracy``, the score of the last answer by the built-in scorer
        of the row's ``data_source``; ``interactivity``, from 0 to 1; ``tokens``.
    """
    row = conversation.row
    result = default_compute_score(row["data_source"], conversation.answers()[-1], row["reward_model"]["ground_truth"])
    accuracy = float(result["score"] if isinstance(result, dict) else result)
    client = shared_client(address, model, api_key=key_in(api_key_env), timeout=timeout)
    question = next(str(message["content"]) for message in conversation.messages if message["role"] == "user")
    graded = await rubric_score(client, question, transcript(conversation.messages[1:]), {INTERACTIVE: 1.0})
    score = accuracy + graded["score"] - min(token_price * conversation.tokens, 1.0)
    return {
        "score": score,
        "accuracy": accuracy,
        "interactivity": graded["score"],
        "tokens": float(conversation.tokens),
    }

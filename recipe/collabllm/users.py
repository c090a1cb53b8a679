"""Simulated users: a language model on a server, and one that says the same every time, to try the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.errors import ConfigError
from verl.interactions import BaseInteraction
from verl.rewards.judges import JudgeClient

END = "[END]"
PROMPT = """You play a user who talks with an assistant. Your goal, of which the assistant knows only what you tell it:

<goal>
{goal}
</goal>

The conversation until now:

<conversation>
{conversation}
</conversation>

Write your next message to the assistant, short and as a user would, and nothing else. Do not solve the task yourself. \
If the assistant has reached your goal, write {end}."""


class LanguageModelUser(BaseInteraction):
    """A user played by the model at ``config.address``; a row gives ``interaction_kwargs: {name: ..., goal: ...}``.

    The conversation ends where the reply has `END`. Equal conversations get one reply, which is stored.

    Args:
        config: ``address``, ``model`` ("user"), ``timeout`` (25 seconds), ``options`` of requests.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self.client = JudgeClient(
            self.config.get("address"),
            str(self.config.get("model", "user")),
            timeout=float(self.config.get("timeout", 25.0)),
            options=self.config.get("options"),
        )

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """As the base class; the turn has no reward.

        Raises:
            ConfigError: a row without a goal. JudgeError: the server gave no reply.
        """
        goal = kwargs.get("goal")
        if not isinstance(goal, str):
            raise ConfigError("a simulated user has a goal", key="extra_info.interaction_kwargs.goal", got=goal)
        conversation = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
        reply = await self.client.ask(PROMPT.format(goal=goal, conversation=conversation, end=END))
        return END in reply.text, reply.text.strip(), 0.0, {}


class PlainUser(BaseInteraction):
    """Says ``config.text`` ("Go on.") every time."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        return False, str(self.config.get("text", "Go on.")), 0.0, {}

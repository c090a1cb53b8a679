"""The forms in which clients speak to the endpoint: what each request becomes, and how its answer is written.

A form is made of the body of a request and the conversation that it belongs to. It holds the checked request and
writes the reply, as one JSON object or as server-sent events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from verl.agent_loop.server import replies
from verl.agent_loop.server.conversation import Conversation, ModelReply
from verl.agent_loop.server.protocol import CompletionRequest, read_chat, read_text
from verl.json_text import JsonObject
from verl.serving import ApiError


class ClientForm(Protocol):
    """One request of a client.

    Attributes:
        ask: the request, checked.
    """

    ask: CompletionRequest

    def __init__(self, payload: object, owner: Conversation):
        """Raises `ApiError` for a request that cannot be followed."""

    def payload(self, reply: ModelReply) -> JsonObject:
        """The answer to a request that is not streamed."""

    def events(self, reply: ModelReply) -> Iterator[bytes]:
        """The events of a streamed answer; the sampler hands answers over complete: each text comes in one piece."""

    @staticmethod
    def error(error: ApiError) -> JsonObject:
        """The body of a refusal."""


class ChatForm:
    """OpenAI's ``/v1/chat/completions``."""

    def __init__(self, payload: object, owner: Conversation):
        self.ask, self._prompts = read_chat(payload, owner.sees), owner.prompts

    def payload(self, reply: ModelReply) -> JsonObject:
        return replies.complete_answer(reply, self._prompts)

    def events(self, reply: ModelReply) -> Iterator[bytes]:
        return replies.chunks(reply, self._prompts)

    @staticmethod
    def error(error: ApiError) -> JsonObject:
        return error.body()


class TextForm(ChatForm):
    """OpenAI's ``/v1/completions``."""

    def __init__(self, payload: object, owner: Conversation):
        self.ask, self._prompts = read_text(payload), owner.prompts

"""One endpoint per event loop: up while any conversation is open on it, with one key per conversation."""

from __future__ import annotations

import asyncio
import hmac
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from verl.agent_loop.server import replies
from verl.agent_loop.server.conversation import Conversation
from verl.agent_loop.server.errors import unknown_model
from verl.agent_loop.server.protocol import CompletionRequest, read_chat, read_text
from verl.serving import Handle, HttpRequest, HttpResponse, Server, ServerLimits


class Endpoint:
    """OpenAI's chat completions, completions and models over the samplers of its conversations."""

    def __init__(self, limits: ServerLimits | None = None):
        self._conversations: dict[str, Conversation] = {}
        self._lock = asyncio.Lock()  # conversations that begin and end: the server starts with the first
        routes: dict[tuple[str, str], Handle] = {
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._text,
            ("GET", "/v1/models"): self._models,
            ("GET", "/v1/models/{name:path}"): self._model,
        }
        self.server = Server(routes, self._owner, limits or ServerLimits())

    @asynccontextmanager
    async def open(self, conversation: Conversation) -> AsyncIterator[str]:
        """Serve a conversation; gives the base URL. Its key is worth nothing afterwards."""
        async with self._lock:
            if not self._conversations:
                await self.server.start()
            self._conversations[conversation.key] = conversation
        try:
            yield f"{self.server.address}/v1"
        finally:
            async with self._lock:
                del self._conversations[conversation.key]
                if not self._conversations:
                    await self.server.close()

    def _owner(self, token: str) -> Conversation | None:
        """Compares with every key in constant time, so that a guess tells nothing by how long it took."""
        given, owner = token.encode(), None
        for key, conversation in self._conversations.items():
            if hmac.compare_digest(key.encode(), given):
                owner = conversation
        return owner

    async def _chat(self, request: HttpRequest) -> HttpResponse:
        return await self._complete(request.owner, read_chat(request.json(), request.owner.sees))

    async def _text(self, request: HttpRequest) -> HttpResponse:
        return await self._complete(request.owner, read_text(request.json()))

    async def _complete(self, owner: Conversation, ask: CompletionRequest) -> HttpResponse:
        reply = await owner.answer(ask)

        answered = HttpResponse(sent=partial(owner.delivered, reply), unsent=partial(owner.undelivered, reply))
        if ask.stream:
            answered.events = _events(reply, owner)
        else:
            answered.payload = replies.complete_answer(reply, owner.prompts)
        return answered

    async def _models(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(replies.models(request.owner.models))

    async def _model(self, request: HttpRequest) -> HttpResponse:
        name = request.parameters["name"]
        if name not in request.owner.models:
            raise unknown_model(name, request.owner.models)
        return HttpResponse(replies.model(name))


async def _events(reply: Any, owner: Conversation) -> AsyncIterator[bytes]:
    for event in replies.chunks(reply, owner.prompts):
        yield event


_ENDPOINTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = weakref.WeakKeyDictionary()


def shared_endpoint() -> Endpoint:
    """The endpoint of the running event loop: all conversations of a batch share one port."""
    return _ENDPOINTS.setdefault(asyncio.get_running_loop(), Endpoint())

"""One endpoint per event loop: up while any conversation is open on it, with one key per conversation."""

from __future__ import annotations

import asyncio
import hmac
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial

from verl.agent_loop.server import replies
from verl.agent_loop.server.conversation import Conversation
from verl.agent_loop.server.errors import unknown_model
from verl.agent_loop.server.forms import ChatForm, ClientForm, TextForm
from verl.agent_loop.server.messages_form import CountForm, MessagesForm
from verl.agent_loop.server.responses_form import ResponsesForm
from verl.serving import ApiError, Handle, HttpRequest, HttpResponse, Server, ServerLimits

ROOTS = ("/v1", "/v1/v1")
"""Anthropic's client writes ``/v1`` itself, after a base URL that has it for OpenAI's."""
MESSAGES = tuple(f"{root}/messages" for root in ROOTS)
FORMS: dict[str, type[ClientForm]] = {
    "/v1/chat/completions": ChatForm,
    "/v1/completions": TextForm,
    "/v1/responses": ResponsesForm,
    **dict.fromkeys(MESSAGES, MessagesForm),
}


class Endpoint:
    """OpenAI's chat completions, completions, responses and models, and Anthropic's messages, over the samplers of its
    conversations."""

    def __init__(self, limits: ServerLimits | None = None):
        self._conversations: dict[str, Conversation] = {}
        self._lock = asyncio.Lock()  # conversations that begin and end: the server starts with the first
        routes: dict[tuple[str, str], Handle] = {
            **{("POST", path): partial(self._complete, form) for path, form in FORMS.items()},
            **{("POST", f"{path}/count_tokens"): self._count for path in MESSAGES},
            **{("GET", f"{root}/models"): self._models for root in ROOTS},
            **{("GET", f"{root}/models/{{name:path}}"): self._model for root in ROOTS},
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

    async def _complete(self, form: type[ClientForm], request: HttpRequest) -> HttpResponse:
        owner = request.owner
        try:
            call = form(request.json(), owner)
            reply = await owner.answer(call.ask)
        except ApiError as error:
            return HttpResponse(form.error(error), status=error.status)
        answered = HttpResponse(sent=partial(owner.delivered, reply), unsent=partial(owner.undelivered, reply))
        if call.ask.stream:
            answered.events = _events(call.events(reply))
        else:
            answered.payload = call.payload(reply)
        return answered

    async def _count(self, request: HttpRequest) -> HttpResponse:
        """The tokens of a prompt, without sampling from it."""
        try:
            call = CountForm(request.json(), request.owner)
            return HttpResponse({"input_tokens": request.owner.prompt_of(call.ask).length})
        except ApiError as error:
            return HttpResponse(MessagesForm.error(error), status=error.status)

    async def _models(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(replies.models(request.owner.models))

    async def _model(self, request: HttpRequest) -> HttpResponse:
        name = request.parameters["name"]
        if name not in request.owner.models:
            raise unknown_model(name, request.owner.models)
        return HttpResponse(replies.model(name))


async def _events(events: Iterator[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event


_ENDPOINTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = weakref.WeakKeyDictionary()


def shared_endpoint() -> Endpoint:
    """The endpoint of the running event loop: all conversations of a batch share one port."""
    return _ENDPOINTS.setdefault(asyncio.get_running_loop(), Endpoint())

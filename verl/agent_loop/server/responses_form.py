"""OpenAI's ``/v1/responses``: its items are read as messages of chat completions, and an answer is written as items.

``previous_response_id`` continues a response of the same conversation; the instructions of an earlier request do not
carry over. The form: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from verl.agent_loop.server.conversation import Choice, Conversation, ModelReply
from verl.agent_loop.server.errors import bad
from verl.agent_loop.server.protocol import fields_of, read_chat
from verl.agent_loop.server.replies import event, token_logprobs, token_usage
from verl.json_text import JsonObject
from verl.serving import ApiError

TAKEN = {"model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "top_k", "seed", "stream",
         "stream_options", "store", "parallel_tool_calls", "tools", "tool_choice", "previous_response_id",
         "include"}  # fmt: skip
WITHOUT_EFFECT = {"metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key",
                  "prompt_cache_retention", "prompt_cache_options"}  # fmt: skip
ONLY_DEFAULT: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "top_logprobs": (0,),
    "text": ({}, {"format": {"type": "text"}}),
}
NAMES = {"max_tokens": "max_output_tokens", "messages": "input"}
"""Field of chat completions -> its name here."""
MOST_RESPONSES = 64
"""Newest responses of a conversation that a later request may name."""
LOGPROBS = "message.output_text.logprobs"
TEXT_TYPES = ("input_text", "output_text", "text")


class ResponsesForm:
    """One request of ``/v1/responses``."""

    def __init__(self, payload: object, owner: Conversation):
        body = fields_of(payload, TAKEN, WITHOUT_EFFECT, ONLY_DEFAULT)
        items = body.get("input")
        history = [
            *_before(body, owner),
            *_messages([{"role": "user", "content": items}] if isinstance(items, str) else items),
        ]
        named = ("model", "temperature", "top_p", "top_k", "seed", "stream", "stream_options")
        chat: dict[str, Any] = {name: body[name] for name in named if name in body}
        chat |= {"messages": [*_instructions(body), *history], "logprobs": _logprobs(body.get("include", []))}
        chat |= {"tools": _tools(body.get("tools", [])), "tool_choice": body.get("tool_choice", "auto")}
        if "max_output_tokens" in body:
            chat["max_tokens"] = body["max_output_tokens"]
        try:
            self.ask = read_chat(chat, owner.sees)
        except ApiError as error:
            error.param = NAMES.get(
                str(error.param).partition("[")[0], error.param
            )  # items are not messages one by one
            raise
        self._body, self._owner, self._history = body, owner, history
        self._id, self._created = _new_id("resp"), int(time.time())

    def payload(self, reply: ModelReply) -> JsonObject:
        (choice,) = reply.choices
        self._remember(choice)
        return self._response(reply, self._items(choice))

    def events(self, reply: ModelReply) -> Iterator[bytes]:
        (choice,) = reply.choices
        self._remember(choice)
        items = self._items(choice)
        steps = [*self._begin(reply), *(step for place, item in enumerate(items) for step in _steps(place, item))]
        done = self._response(reply, items)
        steps.append({"type": f"response.{done['status']}", "response": done})
        for number, step in enumerate(steps):
            yield f"event: {step['type']}\n".encode() + event({**step, "sequence_number": number})

    @staticmethod
    def error(error: ApiError) -> JsonObject:
        return error.body()

    def _begin(self, reply: ModelReply) -> Iterator[JsonObject]:
        running = {**self._response(reply, []), "status": "in_progress", "usage": None, "incomplete_details": None}
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": running}

    def _remember(self, choice: Choice) -> None:
        """The conversation up to and with this answer, for a request that names this response; not with store=false."""
        if not self._body.get("store", True):
            return
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
        answer = {"role": "assistant", "content": choice.text, **({"tool_calls": calls} if calls else {})}
        responses = self._owner.responses
        responses[self._id] = [*self._history, answer]
        while len(responses) > MOST_RESPONSES:
            del responses[next(iter(responses))]

    def _items(self, choice: Choice) -> list[JsonObject]:
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        calls = [
            {"type": "function_call", "id": _new_id("fc"), "call_id": call.id, "name": call.name,
             "arguments": call.arguments, "status": "completed"}
            for call in choice.calls
        ]  # fmt: skip
        logprobs = token_logprobs(choice, self._owner.prompts) if self.ask.logprobs else []
        text = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": logprobs}
        message = {"type": "message", "id": _new_id("msg"), "role": "assistant", "status": status, "content": [text]}
        return [*([message] if choice.text.strip() or not calls else []), *calls]

    def _response(self, reply: ModelReply, items: list[JsonObject]) -> JsonObject:
        (choice,) = reply.choices
        usage, is_cut = token_usage(reply), choice.finish_reason == "length"
        echoed = {name: self._body.get(name) for name in ("instructions", "previous_response_id", "max_output_tokens",
                                                          "temperature", "top_p")}  # fmt: skip
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "model": self.ask.model,
            "output": items,
            "parallel_tool_calls": self._body.get("parallel_tool_calls", True),
            "tool_choice": self._body.get("tool_choice", "auto"),
            "tools": self._body.get("tools", []),
            **echoed,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }


def _steps(place: int, item: JsonObject) -> Iterator[JsonObject]:
    """The events of one output item."""
    at = {"item_id": item["id"], "output_index": place}
    begun = {**item, "status": "in_progress", **({"content": []} if item["type"] == "message" else {"arguments": ""})}
    yield {"type": "response.output_item.added", "output_index": place, "item": begun}
    if item["type"] == "message":
        (part,) = item["content"]
        text, logprobs, inside = part["text"], part["logprobs"], {**at, "content_index": 0}
        yield {"type": "response.content_part.added", **inside, "part": {**part, "text": "", "logprobs": []}}
        yield {"type": "response.output_text.delta", **inside, "delta": text, "logprobs": logprobs}
        yield {"type": "response.output_text.done", **inside, "text": text, "logprobs": logprobs}
        yield {"type": "response.content_part.done", **inside, "part": part}
    else:
        arguments = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": arguments}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _before(body: JsonObject, owner: Conversation) -> list[JsonObject]:
    name = body.get("previous_response_id")
    if name is None:
        return []
    if not isinstance(name, str):
        raise bad("previous_response_id", "previous_response_id must be a text.")
    if name not in owner.responses:
        message = f"This conversation has no response {name!r:.80} among its newest {MOST_RESPONSES} that were stored."
        raise ApiError(404, message, "previous_response_not_found", "previous_response_id")
    return owner.responses[name]


def _instructions(body: JsonObject) -> list[JsonObject]:
    text = body.get("instructions")
    if text is not None and not isinstance(text, str):
        raise bad("instructions", "instructions must be a text.")
    return [{"role": "system", "content": text}] if text else []


def _messages(items: object) -> list[JsonObject]:
    """Items as messages; calls belong to the assistant's message before them, as they were sampled."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise bad("input", "input must be a text or a list with at least one item.")
    messages: list[JsonObject] = []
    for number, item in enumerate(items):
        at = f"input[{number}]"
        if not isinstance(item, Mapping):
            raise bad(at, "an item must be an object.")
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), f"{at}.content")})
        elif kind == "function_call":
            function = {"name": str(item.get("name")), "arguments": str(item.get("arguments"))}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", []), call]}
        elif kind == "function_call_output":
            output = _content(item.get("output"), f"{at}.output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output})
        else:
            message = f"an item of type {kind!r:.80} is not supported: message, function_call, function_call_output."
            raise bad(f"{at}.type", message, "unsupported_value")
    return messages


def _content(content: object, at: str) -> str | list[JsonObject]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise bad(at, "a content is a text or a list of parts.")
    parts: list[JsonObject] = []
    for number, part in enumerate(content):
        kind = part.get("type")
        if kind in TEXT_TYPES:
            parts.append({"type": "text", "text": str(part.get("text", ""))})
        elif kind == "input_image" and part.get("image_url"):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            message = f"a part of type {kind!r:.80} is not supported: input_text, output_text, input_image with a URL."
            raise bad(f"{at}[{number}].type", message)
    return parts


def _logprobs(include: object) -> bool:
    if not isinstance(include, list) or any(name != LOGPROBS for name in include):
        raise bad("include", f"include={include!r:.80} is not supported: [{LOGPROBS!r}] or nothing.",
                  "unsupported_parameter")  # fmt: skip
    return bool(include)


def _tools(tools: object) -> list[JsonObject]:
    if not isinstance(tools, list):
        raise bad("tools", "tools must be a list.")
    functions: list[JsonObject] = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise bad(f"tools[{number}]", 'each tool must be {"type": "function", "name": ...}; there are no tools of '
                      "the server here.")  # fmt: skip
        named = {name: tool[name] for name in ("name", "description") if tool.get(name)}
        functions.append({"type": "function", "function": {**named, "parameters": tool.get("parameters") or {}}})
    return functions


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"

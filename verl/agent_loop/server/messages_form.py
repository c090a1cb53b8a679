"""Anthropic's ``/v1/messages``: a request is read as one of chat completions, its answer written as content blocks.

Tool uses are calls of the assistant, tool results messages of tools; both keep their ids. A field that would change the
answer and cannot be followed is refused by name. The form: https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from verl.agent_loop.server.conversation import Choice, Conversation, ModelReply
from verl.agent_loop.server.errors import bad
from verl.agent_loop.server.protocol import fields_of, read_chat
from verl.agent_loop.server.replies import event
from verl.json_text import JsonObject, read_json
from verl.metrics import notice
from verl.serving import ApiError

TAKEN = {"model", "messages", "system", "max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream",
         "tools", "tool_choice"}  # fmt: skip
WITHOUT_EFFECT = {"metadata", "service_tier", "cache_control", "inference_geo", "speed", "user_profile_id",
                  "workspace_id"}  # fmt: skip
ONLY_DEFAULT: dict[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "output_config": ({},),
    "context_management": ({},),
    "mcp_servers": ([],),
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesForm:
    """One request of ``/v1/messages``.

    What the server refuses before it knows the form (a key, a length) has the status of Anthropic's error, and OpenAI's
    body.
    """

    samples = True

    def __init__(self, payload: object, owner: Conversation):
        body = fields_of(payload, TAKEN, WITHOUT_EFFECT, ONLY_DEFAULT)
        chat: dict[str, Any] = {name: body[name] for name in ("model", "temperature", "top_p", "top_k") if name in body}
        chat |= {"stream": body.get("stream", False), "messages": _messages(body), "stop": _stops(body)}
        chat |= {"tools": _tools(body.get("tools", [])), "tool_choice": _choice(body.get("tool_choice"))}
        if "max_tokens" in body:
            chat["max_tokens"] = _within(body["max_tokens"], owner.budget)
        elif self.samples:
            raise bad("max_tokens", "max_tokens is missing: the most tokens of the answer.")
        self.ask = read_chat(chat, owner.sees)

    def payload(self, reply: ModelReply) -> JsonObject:
        (choice,) = reply.choices
        return _message(reply, _blocks(choice), _ending(choice), len(choice.answer.done.token_ids))

    def events(self, reply: ModelReply) -> Iterator[bytes]:
        (choice,) = reply.choices
        nothing = {"stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=_message(reply, [], nothing, 0))
        for index, block in enumerate(_blocks(choice)):
            empty, delta = _pieces(block)
            yield _event("content_block_start", index=index, content_block=empty)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        usage = {"output_tokens": len(choice.answer.done.token_ids)}
        yield _event("message_delta", delta=_ending(choice), usage=usage)
        yield _event("message_stop")

    @staticmethod
    def error(error: ApiError) -> JsonObject:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
        kind = "not_found_error" if error.status == 404 else kind
        at = f"{error.param}: " if error.param else ""  # this form has no field for it
        return {"type": "error", "error": {"type": kind, "message": f"{at}{error.message}"}}


class CountForm(MessagesForm):
    """One request of ``/v1/messages/count_tokens``."""

    samples = False


def _message(reply: ModelReply, content: list[JsonObject], ending: JsonObject, tokens: int) -> JsonObject:
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": tokens,
             "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}  # fmt: skip
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": reply.ask.model}
    return {**head, "content": content, **ending, "usage": usage}


def _ending(choice: Choice) -> JsonObject:
    reason = "stop_sequence" if choice.stop else STOP_REASONS.get(choice.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": choice.stop}


def _blocks(choice: Choice) -> list[JsonObject]:
    """The answer's content. An empty answer is one empty text: agents read ``content[0].text``."""
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": read_json(call.arguments)}
        for call in choice.calls
    ]
    has_text = bool(choice.text.strip()) or not calls
    return [*([{"type": "text", "text": choice.text}] if has_text else []), *calls]


def _pieces(block: JsonObject) -> tuple[JsonObject, JsonObject]:
    """A block as it begins, and what comes after."""
    if block["type"] == "text":
        return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}


def _event(kind: str, **values: object) -> bytes:
    return f"event: {kind}\n".encode() + event({"type": kind, **values})


def _within(tokens: object, budget: int) -> object:
    """``max_tokens`` is required in this form: stock agents name a number that no rollout of a run has."""
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > budget:
        notice("max_tokens of /v1/messages", f"{tokens} is more than a rollout may have: at most {budget} "
               "(data.max_response_length) are sampled, and the stop reason is then max_tokens")  # fmt: skip
        return budget
    return tokens


def _messages(body: JsonObject) -> list[JsonObject]:
    listed = body.get("messages")
    if not isinstance(listed, list) or not listed:
        raise bad("messages", "messages must be a list with at least one message.")
    system = [{"role": "system", "content": _parts(body["system"], "system")}] if body.get("system") else []
    messages: list[JsonObject] = [*system]
    for number, message in enumerate(listed):
        at = f"messages[{number}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise bad(f"{at}.role", f"unknown role {role!r:.80}; known: user, assistant, system.")
        content = message.get("content")
        if role == "assistant":
            messages.append(_assistant(content, f"{at}.content"))
        else:
            messages += _user(content, role, f"{at}.content")
    if messages[-1]["role"] == "assistant":
        raise bad("messages", "The last message is the assistant's: an answer that begins with a text (prefill) is not "
                  "supported.", "unsupported_value")  # fmt: skip
    return messages


def _user(content: object, role: str, at: str) -> Iterator[JsonObject]:
    """A message per tool result, and one for what stands between them."""
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    parts: list[JsonObject] = []
    if not (blocks := _list(content, at)):
        raise bad(at, "a content must not be empty.")
    for number, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            parts.append(_part(block, f"{at}[{number}]"))
            continue
        if parts:
            yield {"role": role, "content": parts}
            parts = []
        answer = _parts(block.get("content") or "", f"{at}[{number}].content")
        if block.get("is_error"):
            notice("is_error of a tool_result", "chat templates have no word for it; the model reads the content alone")
        yield {"role": "tool", "tool_call_id": _text(block, "tool_use_id", f"{at}[{number}]"), "content": answer}
    if parts:
        yield {"role": role, "content": parts}


def _assistant(content: object, at: str) -> JsonObject:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list(content, at)
    text, calls = "", []
    for number, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "text":
            text += str(block.get("text", ""))
        elif kind == "tool_use":
            name, place = _text(block, "name", f"{at}[{number}]"), _text(block, "id", f"{at}[{number}]")
            function = {"name": name, "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": place, "type": "function", "function": function})
        else:
            raise bad(f"{at}[{number}].type", f"a block of type {kind!r:.80} is not supported: text or tool_use.")
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _parts(content: object, at: str) -> str | list[JsonObject]:
    if isinstance(content, str):
        return content
    return [_part(block, f"{at}[{number}]") for number, block in enumerate(_list(content, at))]


def _part(block: JsonObject, at: str) -> JsonObject:
    """A block as a part of chat completions."""
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    if kind != "image":
        raise bad(f"{at}.type", f"a block of type {kind!r:.80} is not supported: text, image, tool_use or tool_result.")
    if not isinstance(source, Mapping) or source.get("type") != "base64":
        raise bad(f"{at}.source", 'an image is {"type": "base64", "media_type": "image/png", "data": "..."}; addresses '
                  "and files are not read.")  # fmt: skip
    return {"type": "image_url", "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"}}


def _text(block: JsonObject, name: str, at: str) -> str:
    if not isinstance(block.get(name), str):
        raise bad(f"{at}.{name}", f"{name} must be a text.")
    return str(block[name])


def _list(content: object, at: str) -> list[JsonObject]:
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise bad(at, "a content is a text or a list of blocks.")
    return content


def _tools(tools: object) -> list[JsonObject]:
    if not isinstance(tools, list):
        raise bad("tools", "tools must be a list.")
    functions: list[JsonObject] = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
            raise bad(f"tools[{number}]", 'each tool must be {"name": ..., "input_schema": {...}}; there are no tools '
                      "of the server here.")  # fmt: skip
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema", {})}
        if tool.get("description"):
            function["description"] = tool["description"]
        functions.append({"type": "function", "function": function})
    return functions


def _choice(choice: object) -> str:
    kind = choice.get("type") if isinstance(choice, Mapping) else None if choice is None else choice
    if kind not in (None, "auto", "none"):
        message = f"tool_choice {kind!r:.80} is not supported: auto or none."
        raise bad("tool_choice", message, "unsupported_value")
    return kind or "auto"


def _stops(body: JsonObject) -> object:
    stops = body.get("stop_sequences", [])
    if not isinstance(stops, list):
        raise bad("stop_sequences", "stop_sequences must be a list of texts.")
    return stops

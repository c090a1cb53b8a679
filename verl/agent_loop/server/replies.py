"""Answers in OpenAI's JSON, whole or as a stream of chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from verl.agent_loop.server.conversation import Choice, ModelReply
from verl.agent_loop.server.prompts import Prompts

DONE = b"data: [DONE]\n\n"


def complete_answer(reply: ModelReply, prompts: Prompts) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    is_chat = reply.ask.messages is not None
    make = _chat_choice if is_chat else _text_choice
    choices = [make(number, choice, reply, prompts) for number, choice in enumerate(reply.choices)]
    return {**_head(reply, "chat.completion" if is_chat else "text_completion"), "choices": choices,
            "usage": token_usage(reply)}  # fmt: skip


def chunks(reply: ModelReply, prompts: Prompts) -> Iterator[bytes]:
    """The events of a streamed answer; the sampler hands answers over whole, so each comes in one piece."""
    is_chat = reply.ask.messages is not None
    head = _head(reply, "chat.completion.chunk" if is_chat else "text_completion")
    for number, choice in enumerate(reply.choices):
        for piece in (
            _pieces(number, choice, reply, prompts) if is_chat else [_text_choice(number, choice, reply, prompts)]
        ):
            yield event({**head, "choices": [piece], **({"usage": None} if reply.ask.usage_in_stream else {})})
    if reply.ask.usage_in_stream:
        yield event({**head, "choices": [], "usage": token_usage(reply)})
    yield DONE


def event(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def token_usage(reply: ModelReply) -> dict[str, int]:
    num_tokens = sum(len(choice.answer.done.token_ids) for choice in reply.choices)
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": reply.prompt_tokens + num_tokens,
    }


def models(names: Sequence[str]) -> dict[str, Any]:
    """The list of ``/v1/models``, on one page for clients of Anthropic's."""
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [model(name) for name in names], **pages}


def model(name: str) -> dict[str, Any]:
    """A model with the fields of OpenAI's form and of Anthropic's; no client minds those of the other."""
    of_anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "verl", **of_anthropic}


def _head(reply: ModelReply, kind: str) -> dict[str, Any]:
    reply_id = f"{'chatcmpl' if reply.ask.messages is not None else 'cmpl'}-{secrets.token_hex(12)}"
    return {"id": reply_id, "object": kind, "created": int(time.time()), "model": reply.ask.model}


def _chat_choice(number: int, choice: Choice, reply: ModelReply, prompts: Prompts) -> dict[str, Any]:
    return {
        "index": number,
        "message": _message(choice),
        "logprobs": _chat_logprobs(choice, prompts) if reply.ask.logprobs else None,
        "finish_reason": choice.finish_reason,
    }


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message["content"] = choice.text or None
        message["tool_calls"] = _tool_calls(choice)
    return message


def _tool_calls(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls
    ]


def _pieces(number: int, choice: Choice, reply: ModelReply, prompts: Prompts) -> Iterator[dict[str, Any]]:
    """The deltas of one chat answer: role, text, calls, end."""
    end = {"index": number, "logprobs": None, "finish_reason": None}
    yield {**end, "delta": {"role": "assistant", "content": "", "refusal": None}}
    logprobs = _chat_logprobs(choice, prompts) if reply.ask.logprobs else None
    if choice.text or logprobs:
        yield {**end, "delta": {"content": choice.text}, "logprobs": logprobs}
    if choice.calls:
        calls = [{"index": place, **call} for place, call in enumerate(_tool_calls(choice))]
        yield {**end, "delta": {"tool_calls": calls}}
    yield {**end, "delta": {}, "finish_reason": choice.finish_reason}


def _text_choice(number: int, choice: Choice, reply: ModelReply, prompts: Prompts) -> dict[str, Any]:
    done = choice.answer.done
    logprobs = None
    if reply.ask.logprobs:
        tokens = [prompts.tokenizer.decode([token]) for token in done.token_ids]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": list(done.log_probs),
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
        }
    return {
        "index": number,
        "text": choice.text,
        "token_ids": list(done.token_ids),
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _chat_logprobs(choice: Choice, prompts: Prompts) -> dict[str, Any]:
    return {"content": token_logprobs(choice, prompts), "refusal": None}


def token_logprobs(choice: Choice, prompts: Prompts) -> list[dict[str, Any]]:
    """An entry per sampled token."""
    done = choice.answer.done
    entries = []
    for token, log_prob in zip(done.token_ids, done.log_probs):
        text = prompts.tokenizer.decode([token])
        entries.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
    return entries

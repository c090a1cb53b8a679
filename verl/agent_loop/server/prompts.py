"""From the messages of a call to tokens that extend what was sampled before; only what is new is templated.

The answers that a client sends back are recognised as messages; their tokens are those that were sampled, never what
the template or the tokenizer would make of the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.agent_loop.extend import Extender, assistant_message
from verl.agent_loop.server.protocol import CompletionRequest
from verl.agent_loop.server.record import Answer, Record
from verl.data.messages import Message
from verl.data.vision.parts import bare, media_parts, text_of
from verl.json_text import object_of
from verl.protocol.tokenizer import Tokenizer


@dataclass(frozen=True)
class Located:
    """Where the prompt of a call stands in its conversation.

    Args:
        parent: the answer that it continues; None: it begins a conversation.
        inserted: the tokens after it, or all of the prompt; one placeholder for each image until they are expanded.
        images: in the new messages, as the client sent them, later as they were loaded.
    """

    parent: Answer | None
    inserted: tuple[int, ...]
    images: tuple[Any, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of the complete prompt."""
        return len(self.inserted) + (0 if self.parent is None else len(self.parent.tokens))


class Prompts:
    """Finds the tokens of a call's prompt.

    Args:
        tokenizer: of the policy.
        template_kwargs: arguments of the chat template in every call.
    """

    def __init__(self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._extenders: dict[str, Extender] = {}

    def locate(self, ask: CompletionRequest, record: Record) -> Located:
        """The answer that the prompt of a call continues, and what is new after it."""
        if ask.messages is not None:
            return self._in_chat(ask, ask.messages, record)
        if isinstance(ask.prompt, str):
            return Located(*self._in_text(ask.prompt, record))
        return Located(*_in_tokens(ask.prompt or (), record))

    def key(self, ask: CompletionRequest, text: str, calls: Sequence[tuple[str, str]] = ()) -> Hashable:
        """The prefix of a later call that continues this answer to ``ask``."""
        if ask.messages is not None:
            calls = [(name, _canonical(arguments)) for name, arguments in calls]
            return _chat_key(ask, [*map(_message_key, ask.messages), ("assistant", text.strip(), tuple(calls))])
        return ask.prompt + text if isinstance(ask.prompt, str) else None

    def text(self, tokens: Sequence[int]) -> str:
        """Sampled tokens as text, without special tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def message(self, tokens: Sequence[int], said: str, calls: Sequence[tuple[str, str, str]]) -> Message:
        """An answer as the extender understands it; ``calls`` are (id, name, arguments)."""
        tool_calls = [
            {"id": name_of, "type": "function", "function": {"name": name, "arguments": arguments}}
            for name_of, name, arguments in calls
        ]
        return assistant_message(self._extender({}).text(tokens), said, tool_calls)

    def _in_chat(self, ask: CompletionRequest, messages: Sequence[Message], record: Record) -> Located:
        keys = [_message_key(message) for message in messages]
        extender = self._extender(dict(ask.template_kwargs))
        shown = extender.template.outside(bare(messages))
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] != "assistant":
                continue
            answer = record.find(_chat_key(ask, keys[:count]))
            if answer is None or answer.message is None:
                continue
            for before in answer.path:
                if before.message is not None:
                    shown[before.place] = before.message
            sampled, tools = answer.done.token_ids, list(ask.tools)
            after = extender.after(sampled, shown[: count - 1], answer.message, shown[count:], tools)
            return Located(answer, tuple(after), _images(messages[count:]))
        return Located(None, tuple(extender.prompt(shown, list(ask.tools))), _images(messages))

    def _extender(self, kwargs: dict[str, Any]) -> Extender:
        key = _canonical(kwargs)
        if key not in self._extenders:
            if kwargs:  # of a request
                kwargs = self._extender({}).template.outside_text(kwargs)
            self._extenders[key] = Extender(self.tokenizer, {**self.template_kwargs, **kwargs})
        return self._extenders[key]

    def _in_text(self, prompt: str, record: Record) -> tuple[Answer | None, tuple[int, ...]]:
        earlier = [a for a in record.answers if isinstance(a.key, str) and prompt.startswith(a.key) and a.key != prompt]
        answer = max(earlier, key=lambda a: len(str(a.key)), default=None)
        rest = prompt if answer is None else prompt.removeprefix(str(answer.key))
        return answer, tuple(self._encode(rest))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _images(messages: Sequence[Message]) -> tuple[Any, ...]:
    return tuple(part["image"] for part in media_parts(messages))


def _in_tokens(prompt: Sequence[int], record: Record) -> tuple[Answer | None, tuple[int, ...]]:
    prompt = tuple(prompt)
    best: Answer | None = None
    length = 0
    for answer in record.answers:
        tokens = answer.tokens
        if length < len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens:
            best, length = answer, len(tokens)
    return best, prompt[length:]


def _chat_key(ask: CompletionRequest, keys: Sequence[Hashable]) -> Hashable:
    """Messages and what else of a request is in its prompt."""
    return (_canonical(list(ask.tools)), _canonical(dict(ask.template_kwargs)), tuple(keys))


def _message_key(message: Message) -> Hashable:
    """A message as it is recognised: an answer by its text without outer white space and its calls."""
    if isinstance(message["content"], list):  # an image by a digest: a conversation has a key for every answer
        parts = [{**part, "image": _digest(part["image"])} if "image" in part else part for part in message["content"]]
        message = {**message, "content": parts}
    if message["role"] != "assistant":
        return _canonical(message)
    calls = [call.get("function", call) for call in message.get("tool_calls", []) if isinstance(call, Mapping)]
    called = tuple((str(call.get("name")), _canonical(call.get("arguments"))) for call in calls)
    return ("assistant", text_of(message["content"]).strip(), called)


def _digest(image: Any) -> str:
    return hashlib.blake2b(_canonical(image).encode(), digest_size=16).hexdigest()


def _canonical(value: Any) -> str:
    """JSON text that is the same for equal values; a text that is JSON stands for its value.

    1.0 equals 1: a client in JavaScript, which has one kind of number, sends a call with 1.0 back with 1.
    """
    return json.dumps(_integral(object_of(value)), sort_keys=True, default=str)


def _integral(value: object) -> object:
    """The value, with every integral float as an integer."""
    if isinstance(value, Mapping):
        return {key: _integral(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_integral(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value

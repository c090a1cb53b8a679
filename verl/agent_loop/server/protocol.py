"""OpenAI's requests, read and checked field by field before anything is sampled.

A field that would change the answer and cannot be followed is refused by name; one that cannot change it (``user``,
``metadata``) is let through. The form: https://platform.openai.com/docs/api-reference/chat and .../completions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.agent_loop.server.errors import bad
from verl.data.messages import IMAGE_NAMES, Message, as_messages, as_tools
from verl.data.vision.parts import media_parts
from verl.errors import DataError, NotBuiltError, suggest

MOST_CHOICES = 64
MOST_STOPS = 16
MOST_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
    "prompt_cache_retention",
}  # fmt: skip
ONLY_DEFAULT: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "top_logprobs": (0,),
}
"""Fields of OpenAI's that this endpoint cannot follow, with the values that ask for nothing."""
SHARED = {"model", "stream", "stream_options", "n", "stop", "temperature", "top_p", "top_k", "seed", "max_tokens",
          "min_tokens", "repetition_penalty", "logprobs"}  # fmt: skip
CHAT = SHARED | {"messages", "max_completion_tokens", "tools", "tool_choice", "chat_template_kwargs"}
TEXT = SHARED | {"prompt"}
NOT_OF_A_REQUEST = {
    "add_generation_prompt", "allow_special_tokens", "chat_template", "continue_final_message", "conversation",
    "max_length", "messages", "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
"""Arguments of a tokenizer's ``apply_chat_template`` that are no words of the template: these are the run's own."""


@dataclass(frozen=True)
class CompletionRequest:
    """A request that was checked; exactly one of ``messages`` and ``prompt`` is set.

    Args:
        sampling: of temperature, top_p, top_k, seed, min_tokens and repetition_penalty those that the request names.
        prompt: a text or token ids.
        parses_calls: whether tool calls are looked for in the answer.
        template_kwargs: further arguments of the chat template.
    """

    model: str
    messages: tuple[Message, ...] | None
    prompt: str | tuple[int, ...] | None
    n: int
    max_tokens: int | None
    stops: tuple[str, ...]
    sampling: dict[str, Any]
    logprobs: bool
    stream: bool
    usage_in_stream: bool
    tools: tuple[dict[str, Any], ...] = ()
    parses_calls: bool = False
    template_kwargs: tuple[tuple[str, Any], ...] = ()


def read_chat(payload: object, images: bool = False) -> CompletionRequest:
    """The request in the body of ``/v1/chat/completions``.

    Args:
        images: the model sees, and contents may have image parts.

    Raises:
        ApiError: naming the field.
    """
    body = fields_of(payload, CHAT)
    tools = _tools(body.get("tools"))
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise bad("tool_choice", f"tool_choice {choice!r} is not supported: 'auto' or 'none'.", "unsupported_value")
    further = body.get("chat_template_kwargs") or {}
    if not isinstance(further, Mapping) or not all(isinstance(name, str) for name in further):
        raise bad("chat_template_kwargs", "chat_template_kwargs must be an object.")
    for name in NOT_OF_A_REQUEST & set(further):
        raise bad("chat_template_kwargs", f"chat_template_kwargs.{name} is the run's own.", "unsupported_parameter")
    logprobs = body.get("logprobs", False)
    if not isinstance(logprobs, bool):
        raise bad("logprobs", "logprobs must be true or false.")
    limits = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    return CompletionRequest(
        messages=tuple(_messages(body.get("messages"), images)),
        prompt=None,
        max_tokens=_whole(body, limits[0], 1) if limits else None,
        logprobs=logprobs,
        tools=tools,
        parses_calls=bool(tools) and choice == "auto",
        template_kwargs=tuple(sorted(further.items())),
        **_shared(body),
    )


def read_text(payload: object) -> CompletionRequest:
    """The request in the body of ``/v1/completions``; without max_tokens it gets OpenAI's 16."""
    body = fields_of(payload, TEXT)
    logprobs = body.get("logprobs")
    if isinstance(logprobs, bool) or not (logprobs is None or logprobs in (0, 1)):
        raise bad("logprobs", "logprobs must be 0 or 1: the log-prob of each chosen token.", "unsupported_value")
    return CompletionRequest(
        messages=None,
        prompt=_prompt(body.get("prompt")),
        max_tokens=16 if body.get("max_tokens") is None else _whole(body, "max_tokens", 1),
        logprobs=logprobs is not None,
        **_shared(body),
    )


def fields_of(
    payload: object,
    known: set[str],
    without_effect: set[str] = WITHOUT_EFFECT,
    only_default: Mapping[str, tuple[object, ...]] = ONLY_DEFAULT,
) -> dict[str, Any]:
    """The fields of a body that are set, null left out.

    Args:
        known: fields that are followed; ``without_effect`` are let through.
        only_default: fields that cannot be followed, with the values that ask for nothing.

    Raises:
        ApiError: no object, an unknown field, or one that cannot be followed.
    """
    if not isinstance(payload, dict):
        raise bad("body", "The body must be a JSON object.")
    for name, value in payload.items():
        if name in known or name in without_effect or value is None:
            continue
        if name not in only_default:
            raise bad(name, f"Unknown field {name!r}. {suggest(name, known)}", "unknown_parameter")
        if value not in only_default[name]:
            raise bad(name, f"{name}={_short(value)} is not supported; leave it out.", "unsupported_parameter")
    return {name: value for name, value in payload.items() if value is not None}


def _shared(body: Mapping[str, Any]) -> dict[str, Any]:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise bad("model", "model must be the name of a model.", "missing_required_parameter")
    stream = body.get("stream", False)
    if not isinstance(stream, bool):
        raise bad("stream", "stream must be true or false.")
    options = body.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise bad("stream_options", "stream_options must be an object.")
    return {
        "model": model,
        "n": _whole(body, "n", 1, MOST_CHOICES) if "n" in body else 1,
        "stops": _stops(body.get("stop", [])),
        "sampling": _sampling(body),
        "stream": stream,
        "usage_in_stream": bool(options.get("include_usage", False)),
    }


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    for name, low, high in (("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0), ("repetition_penalty", 0.0, 100.0)):
        if name in body:
            value = body[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise bad(name, f"{name} must be a number.")
            if not low <= value <= high or (name != "temperature" and value == 0):
                raise bad(name, f"{name}={value} is outside its range ({low:g} to {high:g}).")
            sampling[name] = float(value)
    if "top_k" in body:
        sampling["top_k"] = _whole(body, "top_k", -1)
    if "min_tokens" in body:
        sampling["min_tokens"] = _whole(body, "min_tokens", 0)
    if "seed" in body:
        sampling["seed"] = _whole(body, "seed", 0, 2**63 - 1)
    return sampling


def _whole(body: Mapping[str, Any], name: str, low: int, high: int = 2**31 - 1) -> int:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad(name, f"{name} must be a whole number from {low} to {high}, got {_short(value)}.")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise bad("stop", f"stop must be a text or a list of at most {MOST_STOPS} texts.")
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise bad("stop", "each stop must be a text that is not empty.")
    return tuple(stops)


def _messages(value: Any, images: bool) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise bad("messages", "messages must be a list with at least one message.")
    if len(value) > MOST_MESSAGES:
        raise bad("messages", f"{len(value)} messages are more than the {MOST_MESSAGES} that are allowed.")
    try:
        messages = as_messages(value, where=lambda: "messages", media=("image",) if images else (), padded=False)
    except (DataError, NotBuiltError, TypeError) as error:
        raise bad("messages", str(error)) from error
    for number, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise bad(f"messages[{number}].role", f"unknown role {_short(message['role'])}; known: {', '.join(ROLES)}.")
        for part in media_parts([message]):
            address = _address(part.get("image"))
            if address is None or not address.startswith("data:"):  # a model that chooses a path would read it
                raise bad(f"messages[{number}].content", 'an image is {"type": "image_url", "image_url": {"url": '
                          '"data:image/png;base64,..."}}; paths and addresses are not read.')  # fmt: skip
            part.clear()  # of its other fields some choose the size to which it is decoded
            part.update(type="image", image=address)
    return messages


def _address(image: Any) -> str | None:
    """The URL in an image part; None: it has none."""
    while isinstance(image, Mapping):
        image = next((image[name] for name in IMAGE_NAMES if name in image), None)
    return image if isinstance(image, str) else None


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    try:
        tools = as_tools(value if isinstance(value, list) else None, where=lambda: "tools", padded=False)
    except DataError as error:
        raise bad("tools", str(error)) from error
    if value is not None and not isinstance(value, list):
        raise bad("tools", "tools must be a list.")
    for number, tool in enumerate(tools or []):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, Mapping) or not _is_name(function.get("name")):
            raise bad(f"tools[{number}]", 'each tool must be {"type": "function", "function": {"name": ...}}.')
        parameters = function.get("parameters", {})
        if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties", {}), Mapping):
            raise bad(f"tools[{number}].function.parameters", "parameters must be the JSON schema of an object.")
    return tuple(tools or [])


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Sequence) and value and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return tuple(value)
    raise bad("prompt", "prompt must be one text or one list of token ids, and not empty.")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 256


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:60] + "..."

"""What a language model that judges answers, for `tests.harness.servers.serving`."""

from __future__ import annotations

import re

PATH = "/v1/chat/completions"


def reply(text: str) -> tuple[int, dict]:
    return 200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": {"total_tokens": 5}}


def prompt(payload: dict) -> str:
    return payload["messages"][0]["content"]


def shown(payload: dict, name: str) -> str:
    """What stands between the tags of this name."""
    match = re.search(rf"<{name} ([0-9a-f]{{16}})>\n(.*)\n</{name} \1>", prompt(payload), re.DOTALL)
    assert match is not None
    return match[2]


def longest(payload: dict) -> tuple[int, dict]:
    """A judge without a preference for a position: the longer answer is better."""
    first, second = len(shown(payload, "first")), len(shown(payload, "second"))
    return reply(f"VERDICT: {'TIE' if first == second else 'FIRST' if first > second else 'SECOND'}")

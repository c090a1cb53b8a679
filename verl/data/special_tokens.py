"""Special tokens inside what a person, a tool or a web page wrote: they are text there, not the end of a turn.

A mark is put inside each such token before the template sees the message; the text is then tokenised in pieces that are
cut at the marks, so that no piece holds the token, and decoding the pieces gives the text as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verl.data.messages import Message
from verl.metrics import notice

MARK = "\ue0a5"
"""A character of the private-use area: no text means anything by it, and no template changes it."""
ALLOW = "allow_special_tokens"
WRITTEN_BY_THE_MODEL = "assistant"


def special_tokens(tokenizer: Any) -> frozenset[str]:
    """The special tokens of a tokenizer as text: those that its texts are searched for."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return frozenset(added | set(tokenizer.all_special_tokens))


class SpecialTokensAsText:
    """Marks special tokens in messages, and tokenises marked text.

    Args:
        encode: texts -> ids of each, special tokens recognised and none added.
    """

    def __init__(self, tokenizer: Any, encode: Callable[[Sequence[str]], list[list[int]]]):
        self.tokenizer, self._encode = tokenizer, encode
        # One character cannot be cut in two, and a token of one is what a text may hold anyway.
        names = sorted((t for t in special_tokens(tokenizer) if len(t) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._exact: bool | None = None

    def marked(self, messages: Sequence[Message]) -> list[Message]:
        """The messages; special tokens in them are marked, but for what the model itself has written."""
        return [m if m.get("role") == WRITTEN_BY_THE_MODEL else self._message(m) for m in messages]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of rendered texts with marks in them."""
        found: list[list[int]] = []
        for text in texts:
            pieces = self._pieces(text)
            found.append([number for ids in self._encode(pieces) for number in ids])
        return found

    def _pieces(self, text: str) -> list[str]:
        if self._exact is None:  # some tokenizers begin every text with a space
            probe = self._encode(["<", "|x"])
            self._exact = self.tokenizer.decode([*probe[0], *probe[1]]).endswith("<|x")
        return text.split(MARK) if self._exact else [text.replace(MARK, " ")]

    def _message(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, str):
            new: Any = self._text(content)
        elif isinstance(content, list):
            new = [
                {**part, "text": self._text(part["text"])} if isinstance(part.get("text"), str) else part
                for part in content
                if isinstance(part, dict)
            ]
        else:
            return message
        return message if new == content else {**message, "content": new}

    def _text(self, text: str) -> str:
        if not self._special.search(text):
            return text
        notice(
            "data",
            "messages contain special tokens of the tokenizer, which are taken as text; "
            f"data.apply_chat_template_kwargs={{{ALLOW}: true}} takes them as what they are",
        )
        return self._special.sub(lambda found: f"{found[0][:1]}{MARK}{found[0][1:]}", text)


def without_marks(texts: Iterable[str]) -> list[str]:
    """The texts as they were."""
    return [text.replace(MARK, "") for text in texts]

"""Special tokens inside what a person, a tool or a web page wrote: they are text there, not the end of a turn.

A mark is put inside each such token before the template sees it; the text is then tokenised in pieces that are cut at
the marks, so that no piece holds the token, and decoding the pieces gives the text as it was. Every process draws its
mark: nothing that comes from outside can hold it, and no token depends on it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from verl.data.messages import Message
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.protocol.tokenizer import Tokenizer


def random_mark() -> str:
    """A text that nobody can guess and no template changes: digits only."""
    return "".join(secrets.choice("0123456789") for _ in range(40))


MARK = random_mark()
"""Stands inside special tokens that are text."""
ALLOW = "allow_special_tokens"
ASSISTANT = "assistant"
SAID = ("content", "said", "reasoning_content")
"""The fields of an answer that hold what a model wrote."""


class SampledMessage(dict[str, Any]):
    """An answer that the policy itself has sampled: the special tokens in what it says are its own."""


def special_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    """The special tokens of a tokenizer as text: those that its texts are searched for."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return frozenset(added | set(tokenizer.all_special_tokens))


class SpecialTokensAsText:
    """Marks special tokens in what comes from outside, and tokenises marked text.

    Args:
        encode: texts -> ids of each, special tokens recognised and none added.
        structure: the special tokens with which the template writes turns; in an answer that stands in the data only
            these are marked, since others (of thoughts and calls) are a model's own words. Called at most once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode: Callable[[Sequence[str]], list[list[int]]],
        structure: Callable[[], frozenset[str]],
    ):
        self.tokenizer, self._encode, self._structure = tokenizer, encode, structure
        # One character cannot be cut in two, and a token of one is what a text may hold anyway.
        self._all = _Tokens(token for token in special_tokens(tokenizer) if len(token) > 1)
        self._of_turns: _Tokens | None = None
        self._exact: bool | None = None

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with every string in them marked: contents, roles, names, calls with their arguments.

        An answer from the data is marked where a token would end or open a turn; of a `SampledMessage`, what it says is
        left alone.
        """
        return [self._message(message) for message in messages]

    def defused(self, value: object) -> Any:
        """A text, or all texts in lists and dicts, keys included, with their special tokens marked."""
        return self._all.marked(value)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of rendered texts with marks in them."""
        encoded: list[list[int]] = []
        for text in texts:
            pieces = self._pieces(text)
            encoded.append([number for ids in self._encode(pieces) for number in ids])
        return encoded

    def _pieces(self, text: str) -> list[str]:
        if self._exact is None:  # some tokenizers begin every text with a space
            probe = self._encode(["<", "|x"])
            self._exact = self.tokenizer.decode([*probe[0], *probe[1]]).endswith("<|x")
        return text.split(MARK) if self._exact else [text.replace(MARK, " ")]

    def _message(self, message: Message) -> Message:
        if message.get("role") != ASSISTANT:
            return self.defused(message)
        texts = {name: message[name] for name in SAID if name in message}
        if texts and not isinstance(message, SampledMessage):
            if self._of_turns is None:
                self._of_turns = self._all.only(self._structure())
            texts = self._of_turns.marked(texts)
        return {**self.defused({name: value for name, value in message.items() if name not in SAID}), **texts}


class _Tokens:
    """Finds some special tokens in texts.

    Args:
        names: the tokens as text.
    """

    def __init__(self, names: Iterable[str]):
        self.names = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        # Two texts that a template writes one behind the other may hold a token between them.
        signs = [name for name in self.names if not name[0].isalnum()]
        self._begun = {name[:length] for name in signs for length in range(1, len(name))}
        self._lengths = sorted({len(begun) for begun in self._begun}, reverse=True)

    def only(self, names: frozenset[str]) -> _Tokens:
        return _Tokens(name for name in self.names if name in names)

    def marked(self, value: object) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate has no tokens
        if self._pattern.search(text):
            notice(
                "data",
                "messages contain special tokens of the tokenizer, which are taken as text; "
                f"data.apply_chat_template_kwargs={{{ALLOW}: true}} takes them as what they are",
            )
            text = self._pattern.sub(lambda match: f"{match[0][:1]}{MARK}{match[0][1:]}", text)
        return f"{text}{MARK}" if any(text[-length:] in self._begun for length in self._lengths) else text


def without_marks(texts: Iterable[str]) -> list[str]:
    """The texts as they were."""
    return [text.replace(MARK, "") for text in texts]

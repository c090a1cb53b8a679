"""A tokenizer's chat template: messages to text to ids, with errors that name what to set.

Text is rendered first and tokenised after, so that masks and lengths can be found in the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import TemplateError

from verl.data.messages import Message
from verl.data.special_tokens import ALLOW, ASSISTANT, SpecialTokensAsText, random_mark, special_tokens
from verl.data.special_tokens import MARK as MARKED
from verl.data.watch import DeadlineExceeded, within
from verl.errors import DataError, ModelError

RENDER_SECONDS = 10.0
"""Processor time that one conversation may take."""
RENDER_CHARACTERS = 1_000_000
"""What a template may write, beside `RENDER_GROWTH` times what it is given."""
RENDER_GROWTH = 20
MARK = random_mark()
"""A content that marks a place: nothing that comes from outside holds it, and no template changes it."""
REFUSALS = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError,
)  # fmt: skip
"""What a template raises that cannot write a conversation."""


class TemplateLimitError(DataError):
    """The chat template takes too long or writes too much, perhaps only for these messages."""


class ChatTemplate:
    """Renders and tokenises conversations with one tokenizer and fixed template arguments.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        kwargs: further arguments of the template (``enable_thinking`` and the like). ``allow_special_tokens`` is ours:
            special tokens in messages count as such; else they are text, and cannot end a turn. What `outside` has
            marked stays text in any case.

    Raises:
        ModelError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None):
        if not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template, so messages cannot be turned into a prompt",
                key="custom_chat_template",
                got=tokenizer.name_or_path,
                fix="Set it in the model's section to a Jinja template or a file.",
            )
        self.tokenizer = tokenizer
        self.kwargs = dict(kwargs or {})
        self._allowed = bool(self.kwargs.pop(ALLOW, False))
        self._as_text = SpecialTokensAsText(tokenizer, self._ids, self._structure)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **extra: Any) -> str:
        """The conversation as text; a template that refuses it is a `DataError` with the template's own words.

        Special tokens that a message or another argument holds are marked in it: `encode` knows, `without_marks` takes
        the marks away.

        Raises:
            TemplateLimitError: it takes too long, or writes too much.
        """
        try:
            if not self._allowed:
                messages, extra = self._as_text.messages(messages), self._as_text.defused(extra)
            return self._write(messages, {"add_generation_prompt": add_generation_prompt, **self.kwargs, **extra})
        except TemplateLimitError:
            raise
        except REFUSALS as failure:
            raise DataError(f"the chat template refuses the conversation: {failure}") from failure

    def outside(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of a tool, a user or a client with their special tokens marked, whatever the arguments allow."""
        return self._as_text.messages(messages)

    def outside_text(self, value: Any) -> Any:
        """The same for a text, or for all texts in lists and dicts."""
        return self._as_text.defused(value)

    def _write(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        work = partial(self.tokenizer.apply_chat_template, list(messages), **arguments, tokenize=False)
        try:
            text = within(RENDER_SECONDS, work)
        except DeadlineExceeded as failure:
            raise TemplateLimitError(f"the chat template did not end within {RENDER_SECONDS:g} s") from failure
        if len(text) > RENDER_CHARACTERS:
            most = RENDER_CHARACTERS + RENDER_GROWTH * _characters([messages, arguments])
            if len(text) > most:
                raise TemplateLimitError(f"the chat template writes {len(text)} characters, more than {most}")
        return text

    def _structure(self) -> frozenset[str]:
        """The special tokens that the template writes around turns, and those that begin, end and pad a text."""
        known = special_tokens(self.tokenizer)
        turns = [("user", "x"), (ASSISTANT, "x"), ("user", "x")]
        try:
            text = self._write([{"role": role, "content": said} for role, said in turns], {})
        except (DataError, *REFUSALS):
            return known  # it needs more than this
        own = {self.tokenizer.eos_token, self.tokenizer.bos_token, self.tokenizer.pad_token}
        return frozenset(token for token in known if token in text or token in own)

    def check_generation(self) -> None:
        """Whether the template begins an answer when it is asked to.

        One without a generation prompt that writes a header before an answer all the same would make the model learn
        to write that header, and never show it at inference.

        Raises:
            ModelError: it has none and writes a header, or it does not end, or writes without end.
        """
        asked: list[Message] = [{"role": "user", "content": "x"}]
        try:
            bare, prompt = self.render(asked), self.render(asked, add_generation_prompt=True)
            whole = self.render([*asked, {"role": ASSISTANT, "content": MARK}])
        except TemplateLimitError as failure:
            key = "custom_chat_template"
            raise ModelError(failure.message, key=key, got=self.tokenizer.name_or_path) from failure
        except DataError:
            return  # a template that needs more than this speaks for itself when it meets a row
        header = whole[len(bare) : whole.find(MARK)] if whole.startswith(bare) and MARK in whole else ""
        if prompt == bare and header.strip():
            raise ModelError(
                f"the chat template has no generation prompt, but writes {header!r} before an answer",
                key="custom_chat_template",
                got=self.tokenizer.name_or_path,
                fix="Give it one: {% if add_generation_prompt %}"
                + header.replace("\n", "\\n")
                + "{% endif %} at its end.",
            )

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text: the template wrote the special tokens, so none is added."""
        return self.encode_many([text])[0]

    def encode_content(self, text: str) -> list[int]:
        """The ids of what a message says, without a template."""
        return self.encode(text if self._allowed else self._as_text.defused(text))

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in one call."""
        encoded = self._ids([text for text in texts if MARKED not in text])
        if len(encoded) == len(texts):
            return encoded
        plain = iter(encoded)
        return [self._as_text.encode([text])[0] if MARKED in text else next(plain) for text in texts]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def _characters(value: Any) -> int:
    """How many characters are in all texts of nested lists and dicts."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(key) + _characters(item) for key, item in value.items())
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 0

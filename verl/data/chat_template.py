"""A tokenizer's chat template: messages to text to ids, with errors that name what to set.

Text is rendered first and tokenised after, so that masks and lengths can be found in the text.
What a template leaves out of a conversation is searched for with marks (`verl.data.written`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jinja2 import TemplateError

from verl.data.messages import Message
from verl.data.special_tokens import ALLOW, ASSISTANT, SpecialTokensAsText, random_mark, special_tokens
from verl.data.special_tokens import MARK as MARKED
from verl.data.watch import DeadlineExceeded, headroom, within
from verl.data.written import CALLS, UNKNOWN, Forms, MarkedPart, call_forms, content_roles, marked, missing, shape
from verl.errors import DataError, ModelError
from verl.metrics import notice

RENDER_SECONDS = 10.0
"""Processor time that one conversation may take."""
RENDER_CHARACTERS = 1_000_000
"""What a template may write, beside `RENDER_GROWTH` times what it is given."""
RENDER_GROWTH = 20
PROBE_BYTES = 512 << 20
"""Memory that a template may need for a conversation of a few words."""
MOST_SHAPES = 4096
"""How many shapes of conversations are remembered, over all templates."""
MARK = random_mark()
"""A content that marks a place: nothing that comes from outside holds it, and no template changes it."""
REFUSALS = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError,
)  # fmt: skip
"""What a template raises that cannot write a conversation."""
_known: dict[Any, Any] = {}
"""What is known of a template's text with its arguments."""


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
            messages = self._fitted(messages)
            if not self._allowed:
                messages, extra = self._as_text.messages(messages), self._as_text.defused(extra)
            return self._write(messages, {"add_generation_prompt": add_generation_prompt, **self.kwargs, **extra})
        except TemplateLimitError:
            raise
        except REFUSALS as failure:
            raise DataError(f"the chat template refuses the conversation: {failure}") from failure

    def prompt(self, messages: Sequence[Message], **arguments: Any) -> str:
        """`render` up to where an answer begins; notices say what the template leaves out (`check_written`)."""
        arguments = {"add_generation_prompt": True, **arguments}
        text = self.render(messages, **arguments)
        self.check_written(messages, **arguments)
        return text

    def check_written(self, messages: Sequence[Message], learns: bool = False, **arguments: Any) -> None:
        """Say which parts of a conversation, and which arguments, the template does not write.

        Args:
            learns: the assistant's messages are trained on: where a part of them is left out, it is a `DataError`.
        """
        written = str(self.tokenizer.chat_template)
        for part in self.lost(messages, **arguments):
            way = part.way_out(written)
            if part.field == UNKNOWN:
                notice("the chat template and marks", f"whether it writes all that is said is not known: {part.detail}")
            elif not (learns and part.is_trained):
                where = "only writes this in the last turn" if part.earlier else "does not write this"
                name = replace(part, detail="" if part.role else part.detail).label  # a policy may write any tag
                notice(f"the chat template and {name}", f"it {where}: the model does not see it. {way}")
            elif not part.earlier:  # else the turn is taken as it was produced, or refused
                fault = f"message {part.message}: the chat template does not write {part.label}, which would be trained"
                raise DataError(fault, fix=way)
        for name in sorted({*self.kwargs, *arguments} - {"add_generation_prompt", "continue_final_message", "tools"}):
            if name not in written:
                notice(f"the chat template and {name}", "it does not read this argument, which changes nothing")

    def lost(self, messages: Sequence[Message], **arguments: Any) -> tuple[MarkedPart, ...]:
        """The parts of a conversation that the template leaves out; tried once for conversations of one shape."""
        tools = arguments.pop("tools", None)
        key = (shape(messages, tools), tuple(sorted((name, repr(value)) for name, value in arguments.items())))
        return self.once(key, lambda: tuple(self._lost(messages, tools, arguments)))

    def _lost(self, messages: Sequence[Message], tools: Any, arguments: dict[str, Any]) -> list[MarkedPart]:
        messages, tools, marks = marked(messages, tools)
        arguments = {**arguments, **({"tools": tools} if tools else {})}
        try:
            lost = missing(self.render(messages, **arguments), marks)
            arguments["add_generation_prompt"] = False
            for part in [part for part in lost if part.role == ASSISTANT and part.message != len(messages) - 1]:
                upto = missing(self.render(messages[: (part.message or 0) + 1], **arguments), marks)
                never = [other for other in upto if (other.message, other.field) == (part.message, part.field)]
                lost[lost.index(part) : lost.index(part) + 1] = never or [replace(part, earlier=True)]
        except TemplateLimitError:
            raise
        except DataError as failure:
            return [MarkedPart(None, "", UNKNOWN, str(failure))]
        return list(dict.fromkeys(lost))

    def once(self, key: object, find: Callable[[], Any]) -> Any:
        """What ``find`` gives for this template's text and arguments, called once."""
        key = (str(self.tokenizer.chat_template), repr(self.kwargs), key)
        if key not in _known:
            result = find()
            if len(_known) >= MOST_SHAPES:
                _known.clear()
            _known[key] = result
        return _known[key]

    def forms(self) -> Forms:
        """How the template takes contents and the arguments of calls; its first rendering, with a limit of memory."""

        def find() -> Forms:
            with headroom(PROBE_BYTES):
                return Forms(content_roles(self._tried), *call_forms(self._tried))

        return self.once("forms", find)

    def _fitted(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages in the forms that the template writes."""
        forms = self.forms()
        if not forms.parts and not any(message.get(name) for message in messages for name in CALLS):
            return messages
        if forms.parts:
            text = "it writes contents only as lists of parts, so a text is given to it as one part of type text"
            notice("the chat template's contents", text)
        return [forms.fitted(message) for message in messages]

    def _tried(self, messages: list[Message]) -> str | None:
        """A small conversation as text; None where the template refuses it."""
        try:
            return self._write(messages, self.kwargs)
        except TemplateLimitError:
            raise
        except MemoryError as failure:
            most = PROBE_BYTES >> 20
            raise TemplateLimitError(f"the chat template needs over {most} MB for a few words") from failure
        except REFUSALS:
            return None

    def outside(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of a tool, a user or a client with their special tokens marked, whatever the arguments allow."""
        return self._as_text.messages(messages)

    def outside_text(self, value: object) -> Any:
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
        every = special_tokens(self.tokenizer)
        turns = [("user", "x"), (ASSISTANT, "x"), ("user", "x")]
        try:
            text = self._write([{"role": role, "content": content} for role, content in turns], {})
        except (DataError, *REFUSALS):
            return every  # it needs more than this
        special = {self.tokenizer.eos_token, self.tokenizer.bos_token, self.tokenizer.pad_token}
        return frozenset(token for token in every if token in text or token in special)

    def check_generation(self) -> None:
        """Whether the template writes a generation prompt.

        One without a generation prompt that writes a header before an answer all the same would make the model learn
        to write that header, and never show it at inference.

        Raises:
            ModelError: it has none and writes a header, or it does not end, or writes without end.
        """
        question: list[Message] = [{"role": "user", "content": "x"}]
        try:
            bare, prompt = self.render(question), self.render(question, add_generation_prompt=True)
            answered = self.render([*question, {"role": ASSISTANT, "content": MARK}])
        except TemplateLimitError as failure:
            key = "custom_chat_template"
            raise ModelError(failure.message, key=key, got=self.tokenizer.name_or_path) from failure
        except DataError:
            return  # a template that needs more than this fails at its first row
        header = answered[len(bare) : answered.find(MARK)] if answered.startswith(bare) and MARK in answered else ""
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

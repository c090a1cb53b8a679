"""A tokenizer's chat template: messages to text to ids, with errors that name what to set.

Text is rendered first and tokenised after, so that masks and lengths can be found in the text.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from verl.data.messages import Message
from verl.data.special_tokens import ALLOW, SpecialTokensAsText
from verl.data.special_tokens import MARK as MARKED
from verl.errors import DataError, ModelError

PROBE_SECONDS = 10.0
PROBE_CHARACTERS = 1_000_000
MARK = "verlMarksThisPlace"
"""A content that no template changes: letters only."""


class ChatTemplate:
    """Renders and tokenises conversations with one tokenizer and fixed template arguments.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        kwargs: further arguments of the template (``enable_thinking`` and the like). ``allow_special_tokens`` is ours:
            special tokens in messages count as such; else they are text, and cannot end a turn.

    Raises:
        ModelError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None):
        if not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template, so messages cannot be turned into a prompt",
                key="model.custom_chat_template",
                got=tokenizer.name_or_path,
                fix="Set it (actor_rollout_ref.model.custom_chat_template in main_ppo) to a Jinja template or a file.",
            )
        self.tokenizer = tokenizer
        self.kwargs = dict(kwargs or {})
        allowed = bool(self.kwargs.pop(ALLOW, False))
        self._as_text = None if allowed else SpecialTokensAsText(tokenizer, self._ids)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **extra: Any) -> str:
        """The conversation as text; a template that refuses it is a `DataError` with the template's own words.

        Special tokens that a message holds are marked in it: `encode` knows, `without_marks` takes the marks away.
        """
        if self._as_text is not None:
            messages = self._as_text.marked(messages)
        arguments = {"add_generation_prompt": add_generation_prompt, **self.kwargs, **extra}
        try:
            return self.tokenizer.apply_chat_template(list(messages), **arguments, tokenize=False)
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
            MemoryError,
        ) as failure:
            raise DataError(f"the chat template refuses the conversation: {failure}") from failure

    def check_generation(self) -> None:
        """Whether the template begins an answer when it is asked to.

        One without a generation prompt that writes a header before an answer all the same would make the model learn
        to write that header, and never show it at inference.

        Raises:
            ModelError: it has none and writes a header, or it does not end, or writes without end.
        """
        asked: list[Message] = [{"role": "user", "content": "x"}]
        try:
            bare, prompt, whole = self._probe(asked)
        except DataError:
            return  # a template that needs more than this speaks for itself when it meets a row
        header = whole[len(bare) : whole.find(MARK)] if whole.startswith(bare) and MARK in whole else ""
        if prompt == bare and header.strip():
            raise ModelError(
                f"the chat template has no generation prompt, but writes {header!r} before an answer",
                key="model.custom_chat_template",
                got=self.tokenizer.name_or_path,
                fix="Give it one: {% if add_generation_prompt %}"
                + header.replace("\n", "\\n")
                + "{% endif %} at its end.",
            )

    def _probe(self, asked: list[Message]) -> list[str]:
        """A question without and with a generation prompt, and with an answer; in a thread that is given some time."""
        found: list[list[str] | DataError] = []

        def work() -> None:
            try:
                answered = [*asked, {"role": "assistant", "content": MARK}]
                found.append(
                    [self.render(asked), self.render(asked, add_generation_prompt=True), self.render(answered)]
                )
            except DataError as failure:
                found.append(failure)
            except SystemExit:  # it was too slow, see below
                return

        thread = threading.Thread(target=work, name="chat template", daemon=True)
        thread.start()
        thread.join(PROBE_SECONDS)
        if not found:
            if thread.ident is not None:  # ends the thread at its next instruction
                exit_ = ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), exit_)
            raise self._hostile(f"did not end within {PROBE_SECONDS:g} s for two short messages")
        (result,) = found
        if isinstance(result, DataError):
            raise result
        if max(map(len, result)) > PROBE_CHARACTERS:
            raise self._hostile(f"writes more than {PROBE_CHARACTERS} characters for two short messages")
        return result

    def _hostile(self, what: str) -> ModelError:
        return ModelError(
            f"the chat template {what}", key="model.custom_chat_template", got=self.tokenizer.name_or_path
        )

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text: the template wrote the special tokens, so none is added."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, in one call."""
        if self._as_text is None:
            return self._ids(texts)
        found = self._ids([text for text in texts if MARKED not in text])
        if len(found) == len(texts):
            return found
        plain = iter(found)
        return [self._as_text.encode([text])[0] if MARKED in text else next(plain) for text in texts]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []

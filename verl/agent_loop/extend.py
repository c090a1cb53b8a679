"""A conversation is extended by tokens: what was sampled stays as it was sampled, only what is new is templated.

Rendering it again is not the same: a template may rewrite earlier turns (Qwen3 drops their thinking), and a text may
have other tokens than those that were sampled. So the template is probed for what it writes *after* an answer: the
answer is replaced by a mark, and what follows the mark is tokenised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from verl.agent_loop.failed import RunStops
from verl.data.chat_template import MARK, ChatTemplate
from verl.data.messages import Message
from verl.data.special_tokens import ASSISTANT, SampledMessage, random_mark, special_tokens
from verl.errors import DataError, RolloutError
from verl.metrics import notice
from verl.protocol.tokenizer import Tokenizer

PROBE = random_mark()
"""What a tool answers where the template is tried out."""
MOST_ALIKE = 3
Form = Literal["plain", "calls", "user"]
"""How tool answers are put to a template: after an answer as text, after one with ``tool_calls``, as a user turn."""
SHOWN_TOKENS = 12


class TemplateContinuationError(RolloutError):
    """The template cannot write this conversation on: it ends with the answer that it has."""


@dataclass(frozen=True)
class TokenDifference:
    """Where the recorded tokens are not those of the conversation rendered again."""

    position: int
    recorded: tuple[int, ...]
    rendered: tuple[int, ...]
    recorded_text: str
    rendered_text: str
    only_space: bool

    def __str__(self) -> str:
        return (
            f"at token {self.position} the conversation has {list(self.recorded)} ({self.recorded_text!r}), rendered "
            f"anew it would have {list(self.rendered)} ({self.rendered_text!r})"
        )


class Extender:
    """Prompts, and what comes between two answers, as tokens.

    Args:
        tokenizer: of the policy, with a chat template.
        kwargs: further arguments of the template.
    """

    def __init__(self, tokenizer: Tokenizer, kwargs: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, kwargs)
        self.specials = special_tokens(tokenizer)
        self._forms: dict[bool, Form] = {}
        self._tried: dict[Any, Form] = {}

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """A conversation up to where the first answer begins; a notice says what the template leaves out of it."""
        return self.template.encode(self.template.prompt(messages, **self._arguments(tools)))

    def after(
        self,
        sampled: Sequence[int],
        history: Sequence[Message],
        answer: Message,
        new: Sequence[Message],
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """The tokens between an answer and the next one.

        Args:
            sampled: the answer's tokens.
            history: the messages before the answer.
            answer: the answer as a message; its ``tool_calls`` matter to some templates.
            new: messages that follow it: answers of tools, or a user's. No special token in them counts as one.

        Raises:
            RunStops: the template cannot be extended by tokens.
            TemplateContinuationError: it can, but not after these messages.
        """
        new = self.template.outside(new)
        form = self._form(tools, answer, new, self._end_text(sampled))
        try:
            text = self._render([*_shaped(history, form), _marked(answer, form), *_shaped(new, form)], tools)
        except DataError as error:
            raise TemplateContinuationError(str(error)) from error
        if MARK not in text:
            raise _cannot("it leaves the last answer out")
        return self._tokens(sampled, text[text.rindex(MARK) + len(MARK) :], form)

    def difference(
        self,
        recorded: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        expand: Callable[[list[int]], list[int]] = list,
    ) -> TokenDifference | None:
        """Where the recorded tokens differ from the same messages rendered again; None where they do not.

        What the template writes after the last recorded token is no difference.

        Args:
            expand: puts the tokens of images in the places of their placeholders.
        """
        begun = next((n for n, message in enumerate(messages) if isinstance(message, SampledMessage)), len(messages))
        messages = [*messages[:begun], *self.template.outside(messages[begun:])]
        shaped = _shaped(messages, self._forms.get(bool(tools), "plain"))
        try:
            rendered = expand(self.template.encode(self._render(shaped, tools, add_generation_prompt=False)))
        except DataError as error:
            return TokenDifference(0, tuple(recorded[:SHOWN_TOKENS]), (), "", f"the template refuses: {error}", False)
        count = min(len(recorded), len(rendered))
        at = next((i for i in range(count) if recorded[i] != rendered[i]), count)
        if at == len(recorded):
            return None
        sides = tuple(recorded[at : at + SHOWN_TOKENS]), tuple(rendered[at : at + SHOWN_TOKENS])
        texts = [self.tokenizer.decode(list(side), skip_special_tokens=False) for side in sides]
        unspaced = ["".join(self.tokenizer.decode(list(ids)[at:]).split()) for ids in (recorded, rendered)]
        return TokenDifference(at, *sides, texts[0], texts[1], only_space=unspaced[1].startswith(unspaced[0]))

    def text(self, sampled: Sequence[int]) -> str:
        """An answer's text as a template is given it: special tokens stay, the turn's end goes."""
        ids = list(sampled)
        if ids and self._end_text(ids):
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def has_special(self, text: str) -> bool:
        """Whether a text holds special tokens, which are text where it is inserted."""
        return any(token in text for token in self.specials)

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: Any) -> str:
        return self.template.render(messages, **{**self._arguments(tools), **options})

    def _arguments(self, tools: Sequence[Any] | None) -> dict[str, Any]:
        shown = {"tools": self.template.outside_text(list(tools))} if tools else {}
        return {"add_generation_prompt": True, **shown}

    def _form(self, tools: Sequence[Any] | None, answer: Message, new: Sequence[Message], end: str) -> Form:
        """The form in which this template writes such messages behind an answer that ends with ``end``.

        It is tried once, with a small conversation of as many calls and the same roles, three of a kind at most.
        """
        runs = [list(run) for _, run in groupby(message["role"] for message in new)]
        roles = tuple(role for run in runs for role in run[:MOST_ALIKE])
        calls = min(max(1, len(answer.get("tool_calls") or ())), MOST_ALIKE)
        simplest = (bool(tools), 1, ("tool",) if "tool" in roles else roles[:1], "")
        key = (bool(tools), calls, roles, end)
        for shape in (simplest, key):
            if shape in self._tried:
                continue
            try:
                self._tried[shape] = self._find_form(tools, *shape[1:])
            except RunStops as error:
                if shape == simplest:
                    raise
                raise TemplateContinuationError(error.message) from error  # a policy may choose what it calls
            if "tool" in roles:
                self._forms[bool(tools)] = self._tried[shape]
        return self._tried[key] if "tool" in roles else self._forms.get(bool(tools), "plain")

    def _find_form(self, tools: Sequence[Any] | None, count: int, roles: Sequence[str], end: str) -> Form:
        function = {"name": "x", "arguments": {}}
        calls = [{"id": f"call{place:05d}", "type": "function", "function": function} for place in range(count)]
        answer = {"role": ASSISTANT, "content": MARK, "tool_calls": calls}
        probes = [f"{PROBE}{place:05d}" for place in range(len(roles))]
        of_tool = {"name": "x", "tool_call_id": "call00000"}
        new = [{"role": r, "content": p, **(of_tool if r == "tool" else {})} for r, p in zip(roles, probes)]
        question = {"role": "user", "content": "x"}
        last = self._forms.get(bool(tools), "plain")
        forms: tuple[Form, ...] = ("plain", "calls", "user") if "tool" in roles else (last,)
        reasons: list[str] = []
        best: Form | None = None
        for form in forms:
            if form == "user" and best:
                break
            try:
                text = self._render([question, _marked(answer, form), *_shaped(new, form)], tools)
            except DataError as error:
                if "tool" not in roles:
                    return form  # the conversation itself says what is wrong with it
                reasons.append(str(error))
                continue
            _, mark, after = text.rpartition(MARK)
            head, ended, _ = after.partition(end or MARK)
            inside = head if ended and form == "calls" else ""
            if mark and all(probe in after and probe not in inside for probe in probes):
                if not end or (ended and (form == "calls" or not head.strip())):
                    best = form
                    break
                best = best or form
            lost = "it leaves out what follows an answer, or writes it inside the answer's turn"
            reasons.append(lost if mark else "it leaves the last answer out")
        if best is None:
            raise _cannot(reasons[0])
        if best == "user":
            notice("the chat template", "it has no tool turns: what tools answer is given as a user's turn")
        return best

    def _tokens(self, sampled: Sequence[int], after: str, form: Form) -> list[int]:
        """What follows an answer as tokens; its own end token is not written twice."""
        end = self._end_text(sampled)
        if end:
            head, mark, tail = after.partition(end)
            if mark and (not head.strip() or form == "calls"):
                ids = self.template.encode(end + tail)
                return ids[1:] if ids[:1] == [int(sampled[-1])] else self.template.encode(tail)
            notice(
                "the chat template",
                f"an answer ended with token {sampled[-1]} ({end!r}), the template continues after an answer with "
                f"{self.template.encode(after)[:SHOWN_TOKENS]} ({after[:40]!r}); both are in the conversation",
            )
        return self.template.encode(after)

    def _end_text(self, sampled: Sequence[int]) -> str:
        """The last token's text if it is a token that stands for itself, else nothing."""
        if not sampled:
            return ""
        text = self.tokenizer.decode([int(sampled[-1])], skip_special_tokens=False)
        return text if text in self.specials else ""


def _marked(answer: Message, form: Form) -> Message:
    """The answer with the mark in place of what it says."""
    calls = [dict(call) for call in answer.get("tool_calls") or ()]
    if form != "calls" or not calls:
        return SampledMessage(role="assistant", content=MARK)
    # The last call is what the answer ends with, so the mark stands there too.
    calls[-1] = {**calls[-1], "function": {**calls[-1]["function"], "arguments": {MARK: MARK}}}
    return SampledMessage(role="assistant", content=MARK, tool_calls=calls)


def assistant_message(text: str, said: str, calls: Sequence[Mapping[str, Any]] = ()) -> Message:
    """An answer as the message that the extender understands.

    Args:
        text: all of it, its calls as the model wrote them.
        said: its text without the calls.
        calls: the calls, as OpenAI writes them.
    """
    message = SampledMessage(role="assistant", content=text)
    return SampledMessage(message, tool_calls=list(calls), said=said) if calls else message


def plain_message(message: Message) -> Message:
    """The message without what only the extender needs."""
    return {name: value for name, value in message.items() if name != "said"}


def _shaped(messages: Sequence[Message], form: Form) -> list[Message]:
    """The messages as a template takes them; in the last form the tool answers of one turn are one user turn."""
    shaped: list[Message] = []
    joins = False
    for message in messages:
        if "said" in message:
            with_calls = {"tool_calls": message["tool_calls"]} if form == "calls" else {}
            content = message["said"] if form == "calls" else message["content"]
            message = SampledMessage(role="assistant", content=content, **with_calls)
        if form == "user" and message["role"] == "tool":
            if joins:
                shaped[-1]["content"] = _joined(shaped[-1]["content"], message["content"])
            else:
                shaped.append({"role": "user", "content": message["content"]})
            joins = True
            continue
        shaped.append(message)
        joins = False
    return shaped


def _joined(first: Any, second: Any) -> Any:
    """Two contents as one, with a line break between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    parts = [[{"type": "text", "text": part}] if isinstance(part, str) else list(part) for part in (first, second)]
    return [*parts[0], {"type": "text", "text": "\n"}, *parts[1]]


def _cannot(reason: str) -> RunStops:
    return RunStops(
        f"the chat template cannot be gone on with after an answer, so there can be no further turn: {reason}",
        key="actor_rollout_ref.model.custom_chat_template",
        fix="Set it to a template that writes user and tool turns after an assistant's turn.",
    )

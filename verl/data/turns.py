"""Which tokens of a conversation the model has to produce: assistant turns without their header, with their end token.

An assistant turn is what the template writes after its own generation prompt, up to the turn's end token; so the loss
falls on exactly what is sampled at inference. The turns are found by rendering the conversation up to each of them.
Some templates rewrite an earlier turn once the conversation continues (Qwen3 drops its thinking): text that
only belongs to the template may differ, but where a part of the message is lost, the conversation is refused unless
the caller wants every turn as it was produced. What no rendering has is searched for with marks (`verl.data.written`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from verl.data.chat_template import MARK, ChatTemplate
from verl.data.messages import Message
from verl.data.special_tokens import ASSISTANT, random_mark
from verl.errors import DataError
from verl.metrics import notice

NEXT = random_mark()
"""What a user says after the answer where a template is tried out."""


@dataclass(frozen=True)
class Segment:
    """A piece of the conversation's text; ``is_target`` says whether the model produces it."""

    text: str
    is_target: bool


@dataclass(frozen=True)
class Turn:
    """One assistant turn in the text, ``whole[start:end]``, its text as the last turn, and what else ends it."""

    start: int
    end: int
    produced: str
    stop: str = ""


@dataclass(frozen=True)
class Closing:
    """What a template writes behind a last answer, and what of it, ``end``, is there too when another turn follows.

    ``opens``: no special token ends a turn but the one with which the next opens. ``decoration`` stands between the
    generation prompt and a last answer.
    """

    tail: str = ""
    end: str = ""
    opens: bool = False
    decoration: str = ""


class TurnFinder:
    """Splits rendered conversations into context and assistant turns, and tokenises them with a loss mask.

    Args:
        template: renders and tokenises.
        keep_produced: take every turn as it was produced when it was the last one, tokenised by itself, where that
            differs from the full conversation, instead of refusing the conversation if a part of a turn gets lost.
        learns: a conversation is refused where the template leaves out what would be trained on; else that is noticed.
    """

    def __init__(self, template: ChatTemplate, *, keep_produced: bool = False, learns: bool = True):
        template.check_generation()
        self.template, self.keep_produced, self.learns = template, keep_produced, learns
        tokens = set(template.tokenizer.get_added_vocab()) | set(template.tokenizer.all_special_tokens)
        self._special = re.compile("|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)) or r"(?!)")

    def encode(self, messages: Sequence[Message], **arguments: Any) -> tuple[list[int], list[int]]:
        """The ids of a conversation and their loss mask (1 on what the model produces), of equal length.

        Raises:
            DataError: no assistant message; the template refuses the conversation, loses a part of a turn, or its
                turns tokenise differently when they stand together.
        """
        conversation = self.template.render(messages, **arguments)
        if not any(message["role"] == ASSISTANT for message in messages):
            raise DataError("the conversation has no assistant message, so there is nothing to learn")
        self.template.check_written(messages, self.learns, **arguments)
        turns = [
            self._find(messages, number, conversation, arguments)
            for number, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]
        texts = [self._text_of(turn, conversation, self._closing(arguments).decoration) for turn in turns]
        return self._tokenize(_segments(conversation, turns, texts))

    def _find(self, messages: Sequence[Message], number: int, conversation: str, arguments: dict[str, Any]) -> Turn:
        before, closing = self._prompt(messages[:number], arguments), self._closing(arguments)
        is_last = number == len(messages) - 1
        upto = conversation if is_last else self.template.render(messages[: number + 1], **arguments)
        marked = None
        if before is None or not conversation.startswith(before):
            marked = self._marked(messages, number, arguments)
            start = marked.index(MARK)
            if marked[:start] != conversation[:start]:
                raise self._unclear(number)
            start = len(conversation[:start].removesuffix(closing.decoration))
            if before is not None:
                self._tell_context(before, conversation, start, is_last)
        else:
            start = len(before)
        if before is not None and upto.startswith(before):
            produced = self._trim(upto[len(before) :], closing, is_last)
        elif upto[:start] == conversation[:start]:
            produced = self._trim(upto[start:], closing, is_last)
        else:
            raise self._unclear(number)
        if conversation.startswith(produced, start):
            end = start + len(produced)
        else:
            end = self._end(marked or self._marked(messages, number, arguments), conversation, number, closing)
        follows = closing.opens and not is_last and messages[number + 1]["role"] != ASSISTANT
        opener = re.compile(rf"\s*(?:{self._special.pattern})").match(conversation, end) if follows else None
        stop = opener[0] if opener else ""
        ends = not closing.opens or (is_last and self._special.search(closing.tail))
        self._tell_end(produced if ends else "", stop)
        return Turn(start, end, produced, stop)

    def _closing(self, arguments: dict[str, Any]) -> Closing:
        """What the template writes behind an answer, tried once with small conversations."""
        arguments = {name: value for name, value in arguments.items() if name != "tools"}
        key = ("closing", repr(sorted(arguments.items())), self._special.pattern)
        return self.template.once(key, lambda: self._find_closing(arguments))

    def _find_closing(self, arguments: dict[str, Any]) -> Closing:
        question, answer = {"role": "user", "content": "x"}, {"role": ASSISTANT, "content": MARK}
        behind = []
        for role in ("user", ASSISTANT):  # what opens the next turn depends on who speaks, what ends this one does not
            with suppress(DataError):
                text = self.template.render([question, answer, {"role": role, "content": NEXT}], **arguments)
                behind += [text.partition(MARK)[2].partition(NEXT)[0]] if NEXT in text.partition(MARK)[2] else []
        try:
            prompt = self.template.render([question], add_generation_prompt=True, **arguments)
            before, mark, tail = self.template.render([question, answer], **arguments).partition(MARK)
        except DataError:
            mark = ""
        if not behind or not mark:
            return Closing()  # it needs more than this, or leaves it out
        decoration = before.removeprefix(prompt) if before.startswith(prompt) else ""
        between, special = _common(*behind), self._special.search(tail)
        ends = [match.end() for match in self._special.finditer(_common(tail, between))]
        if ends or (special and self._special.search(between)):
            return Closing(tail, tail[: max(ends, default=0)], False, decoration)
        return Closing(tail, _common(tail[: special.start() if special else None], between), True, decoration)

    def _tell_context(self, before: str, conversation: str, start: int, is_last: bool) -> None:
        """Say that a turn is trained behind another text than it is sampled behind."""
        rest = before[start:] if before.startswith(conversation[:start]) else before[-40:]
        where = "an answer" if is_last else "an earlier answer"
        fix = "Set custom_chat_template to a template that writes it there"
        message = (
            f"it ends with {rest!r}, which is not written before {where}: the context of training is another. {fix}"
        )
        notice(
            f"the chat template's generation prompt before {where}",
            message + ("." if is_last else ", or end a row with each."),
        )

    def _prompt(self, messages: Sequence[Message], arguments: dict[str, Any]) -> str | None:
        """The text that the model sees before a turn; None for a first message, if the template needs one before."""
        if messages:
            return self.template.render(messages, add_generation_prompt=True, **arguments)
        try:
            return self.template.render(messages, add_generation_prompt=True, **arguments)
        except DataError:
            return None

    def _marked(self, messages: Sequence[Message], number: int, arguments: dict[str, Any]) -> str:
        """The full text with a mark in place of what message ``number`` says."""
        marked = [*messages[:number], {"role": ASSISTANT, "content": MARK}, *messages[number + 1 :]]
        text = self.template.render(marked, **arguments)
        if MARK in text:
            return text
        raise self._unclear(number)

    def _end(self, marked: str, conversation: str, number: int, closing: Closing) -> int:
        """Where a turn ends in the full text: what follows the mark follows the turn too."""
        after = marked[marked.index(MARK) + len(MARK) :]
        if not conversation.endswith(after):
            raise self._unclear(number)
        end = len(conversation) - len(after)
        if (closing.opens or closing.end) and after.startswith(closing.end):
            return end + len(closing.end)
        stop = self._special.match(after)
        return end + (stop.end() if stop else 0)

    def _trim(self, text: str, closing: Closing, is_last: bool) -> str:
        """Without what the template writes after the turn's end token (a newline in most)."""
        if text.endswith(closing.tail) and (not is_last if closing.opens else closing.end):
            return text[: len(text) - len(closing.tail)] + closing.end
        ends = [match.end() for match in self._special.finditer(text)]
        return text[: ends[-1]] if ends and not text[ends[-1] :].strip() else text

    def _tell_end(self, produced: str, stop: str) -> None:
        """Say where a turn ends without a special token, or with one that stands in the next turn."""
        if stop:
            ways = "sampling has to stop at it (eos_token_id in generation_config.json)"
            message = (
                f"only what opens the next turn ends an answer: {stop.strip()!r} is trained as its end, and {ways}"
            )
            notice("the chat template's end of a turn", message)
        elif not re.search(rf"(?:{self._special.pattern})\Z", produced):
            message = "it ends an assistant turn without a special token; the model will not learn where to stop"
            notice("the chat template", message)

    def _text_of(self, turn: Turn, conversation: str, decoration: str) -> str:
        """What of a turn is trained on: its text in the full conversation, or as it was produced."""
        standing = conversation[turn.start : turn.end]
        if standing == turn.produced or self.keep_produced:
            return turn.produced
        if turn.produced == decoration + standing:
            return standing
        raise DataError(
            "the chat template changes an earlier assistant turn once the conversation continues: "
            f"{_short(turn.produced)} becomes {_short(standing)} "
            f"(tokens {self.template.encode(turn.produced)} and {self.template.encode(standing)})",
            fix="Set data.ignore_input_ids_mismatch=true to train every turn as it was produced, or take out what the "
            "template drops (the thinking of earlier turns).",
        )

    def _tokenize(self, segments: list[Segment]) -> tuple[list[int], list[int]]:
        pieces = self.template.encode_many([segment.text for segment in segments])
        turnwise = [i for piece in pieces for i in piece]
        joint_ids = self.template.encode("".join(segment.text for segment in segments))
        if turnwise != joint_ids:
            grown = self._grow(segments, joint_ids)
            if grown is not None:
                pieces, turnwise = grown, joint_ids
            elif not self.keep_produced:
                raise DataError(
                    "the turns one by one have other tokens than the whole conversation: "
                    f"{turnwise} turn by turn, {joint_ids} as a whole",
                    fix="Set data.ignore_input_ids_mismatch=true to train on the tokens turn by turn.",
                )
        mask = [int(segment.is_target) for segment, piece in zip(segments, pieces) for _ in piece]
        return turnwise, mask

    def _grow(self, segments: list[Segment], joint_ids: list[int]) -> list[list[int]] | None:
        """The whole's tokens by segment if the tokens of the text up to each boundary begin it; None if they do not.

        Some tokenizers write a space before any text; what precedes a turn is tokenised as at inference then too, only
        a turn by itself is not.
        """
        texts = ["".join(segment.text for segment in segments[: n + 1]) for n in range(len(segments))]
        pieces, start = [], 0
        for ids in self.template.encode_many(texts):
            if joint_ids[: len(ids)] != ids:
                return None
            pieces.append(joint_ids[start : len(ids)])
            start = len(ids)
        return pieces

    def _unclear(self, number: int) -> DataError:
        return DataError(
            f"message {number}: the chat template writes this assistant turn differently from what it asks the model "
            "to continue, so the turn's tokens cannot be told",
            fix="Does the row contradict its template arguments, such as thinking with enable_thinking=false?",
        )


def _segments(conversation: str, turns: list[Turn], texts: list[str]) -> list[Segment]:
    segments, at = [], 0
    for turn, text in zip(turns, texts):
        segments += [Segment(conversation[at : turn.start], False), Segment(text + turn.stop, True)]
        at = turn.end + len(turn.stop)
    segments.append(Segment(conversation[at:], False))
    return [segment for segment in segments if segment.text]


def _common(*texts: str) -> str:
    """What all texts begin with."""
    return "".join(signs[0] for signs in takewhile(lambda signs: len(set(signs)) == 1, zip(*texts)))


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:80] + " ... " + text[-30:])

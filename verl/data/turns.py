"""Which tokens of a conversation the model has to produce: assistant turns without their header, with their end token.

An assistant turn is what the template writes after its own generation prompt, up to the turn's end token; so the loss
falls on exactly what is sampled at inference. The turns are found by rendering the conversation up to each of them.
Some templates write an earlier turn differently once the conversation goes on (Qwen3 drops its thinking): text that
only belongs to the template may differ, but where a part of the message is lost, the conversation is refused unless
the caller wants every turn as it was produced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.data.chat_template import MARK, ChatTemplate
from verl.data.messages import Message
from verl.errors import DataError
from verl.metrics import notice


@dataclass(frozen=True)
class Segment:
    """A piece of the conversation's text; ``is_target`` says whether the model produces it."""

    text: str
    is_target: bool


@dataclass(frozen=True)
class Turn:
    """One assistant turn in the whole conversation's text: ``whole[start:end]``, and its text when it was the last."""

    start: int
    end: int
    produced: str


class TurnFinder:
    """Splits rendered conversations into context and assistant turns, and tokenises them with a loss mask.

    Args:
        template: renders and tokenises.
        keep_produced: take every turn as it was produced when it was the last one, tokenised by itself, where that
            differs from the whole conversation, instead of refusing the conversation if a part of a turn gets lost.
    """

    def __init__(self, template: ChatTemplate, *, keep_produced: bool = False):
        template.check_generation()
        self.template, self.keep_produced = template, keep_produced
        tokens = set(template.tokenizer.get_added_vocab()) | set(template.tokenizer.all_special_tokens)
        self._special = re.compile("|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)) or r"(?!)")

    def encode(self, messages: Sequence[Message], **arguments: Any) -> tuple[list[int], list[int]]:
        """The ids of a conversation and their loss mask (1 on what the model produces), of equal length.

        Raises:
            DataError: no assistant message; the template refuses the conversation, loses a part of a turn, or its
                turns tokenise differently when they stand together.
        """
        whole = self.template.render(messages, **arguments)
        turns = [
            self._find(messages, number, whole, arguments)
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        if not turns:
            raise DataError("the conversation has no assistant message, so there is nothing to learn")
        kept = [self._text_of(turn, whole, arguments) for turn in turns]
        segments = _segments(whole, turns, kept)
        return self._tokenize(segments)

    def _find(self, messages: Sequence[Message], number: int, whole: str, arguments: dict[str, Any]) -> Turn:
        before = self._prompt(messages[:number], arguments)
        is_last = number == len(messages) - 1
        upto = whole if is_last else self.template.render(messages[: number + 1], **arguments)
        marked = None
        if before is None or not whole.startswith(before):
            marked = self._marked(messages, number, arguments)
            start = marked.index(MARK)
            if marked[:start] != whole[:start]:
                raise self._unclear(number)
            start = len(whole[:start].removesuffix(self._decoration(arguments)))
        else:
            start = len(before)
        if before is not None and upto.startswith(before):
            produced = self._trim(upto[len(before) :])
        elif upto[:start] == whole[:start]:
            produced = self._trim(upto[start:])
        else:
            raise self._unclear(number)
        if whole.startswith(produced, start):
            return Turn(start, start + len(produced), produced)
        return Turn(start, self._end(marked or self._marked(messages, number, arguments), whole, number), produced)

    def _prompt(self, messages: Sequence[Message], arguments: dict[str, Any]) -> str | None:
        """The text that the model sees before a turn; None for a first message, if the template needs one before."""
        if messages:
            return self.template.render(messages, add_generation_prompt=True, **arguments)
        try:
            return self.template.render(messages, add_generation_prompt=True, **arguments)
        except DataError:
            return None

    def _marked(self, messages: Sequence[Message], number: int, arguments: dict[str, Any]) -> str:
        """The whole text with a mark in place of what message ``number`` says."""
        marked = [*messages[:number], {"role": "assistant", "content": MARK}, *messages[number + 1 :]]
        return self.template.render(marked, **arguments)

    def _end(self, marked: str, whole: str, number: int) -> int:
        """Where a turn ends in the whole text: what follows the mark follows the turn too."""
        after = marked[marked.index(MARK) + len(MARK) :]
        if not whole.endswith(after):
            raise self._unclear(number)
        stop = self._special.match(after)
        return len(whole) - len(after) + (stop.end() if stop else 0)

    def _trim(self, text: str) -> str:
        """Without what the template writes after the turn's end token (a newline in most)."""
        ends = [match.end() for match in self._special.finditer(text)]
        if ends and not text[ends[-1] :].strip():
            return text[: ends[-1]]
        message = "it ends an assistant turn without a special token; the model will not learn where to stop"
        notice("the chat template", message)
        return text

    def _text_of(self, turn: Turn, whole: str, arguments: dict[str, Any]) -> str:
        """What of a turn is trained on: its text in the whole conversation, or as it was produced."""
        standing = whole[turn.start : turn.end]
        if standing == turn.produced or self.keep_produced:
            return turn.produced
        if turn.produced == self._decoration(arguments) + standing:
            return standing
        raise DataError(
            "the chat template changes an earlier assistant turn once the conversation goes on: "
            f"{_short(turn.produced)} becomes {_short(standing)} "
            f"(tokens {self.template.encode(turn.produced)} and {self.template.encode(standing)})",
            fix="Set data.ignore_input_ids_mismatch=true to train every turn as it was produced, or take out what the "
            "template drops (the thinking of earlier turns).",
        )

    def _decoration(self, arguments: dict[str, Any]) -> str:
        """What the template itself writes between the generation prompt and the content of a last turn."""
        question = [{"role": "user", "content": "x"}]
        before = self.template.render(question, add_generation_prompt=True, **arguments)
        upto = self.template.render([*question, {"role": "assistant", "content": MARK}], **arguments)
        return upto[len(before) : upto.index(MARK)] if upto.startswith(before) else ""

    def _tokenize(self, segments: list[Segment]) -> tuple[list[int], list[int]]:
        pieces = self.template.encode_many([segment.text for segment in segments])
        turnwise = [i for piece in pieces for i in piece]
        whole = self.template.encode("".join(segment.text for segment in segments))
        if turnwise != whole:
            grown = self._grow(segments, whole)
            if grown is not None:
                pieces, turnwise = grown, whole
            elif not self.keep_produced:
                raise DataError(
                    "the turns one by one have other tokens than the whole conversation: "
                    f"{turnwise} turn by turn, {whole} as a whole",
                    fix="Set data.ignore_input_ids_mismatch=true to train on the tokens turn by turn.",
                )
        mask = [int(segment.is_target) for segment, piece in zip(segments, pieces) for _ in piece]
        return turnwise, mask

    def _grow(self, segments: list[Segment], whole: list[int]) -> list[list[int]] | None:
        """The whole's tokens by segment if the tokens of the text up to each boundary begin it; None if they do not.

        Some tokenizers write a space before any text; what precedes a turn is tokenised as at inference then too, only
        a turn by itself is not.
        """
        texts = ["".join(segment.text for segment in segments[: n + 1]) for n in range(len(segments))]
        pieces, start = [], 0
        for ids in self.template.encode_many(texts):
            if whole[: len(ids)] != ids:
                return None
            pieces.append(whole[start : len(ids)])
            start = len(ids)
        return pieces

    def _unclear(self, number: int) -> DataError:
        return DataError(
            f"message {number}: the chat template writes this assistant turn differently from what it asks the model "
            "to continue, so the turn's tokens cannot be told",
            fix="Does the row contradict its template arguments, such as thinking with enable_thinking=false?",
        )


def _segments(whole: str, turns: list[Turn], kept: list[str]) -> list[Segment]:
    segments, at = [], 0
    for turn, text in zip(turns, kept):
        segments += [Segment(whole[at : turn.start], False), Segment(text, True)]
        at = turn.end
    segments.append(Segment(whole[at:], False))
    return [segment for segment in segments if segment.text]


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:80] + " ... " + text[-30:])

"""Text that a tokenizer cannot represent: without a byte fallback it vanishes, and nobody says so.

The first rows are encoded and decoded again, and their characters compared. What tokenizers change on purpose (case,
accents, compatible forms, spaces, quotes) is no loss.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from verl.data.chat_template import ChatTemplate
from verl.data.messages import Message
from verl.data.overlong import PART
from verl.data.vision.parts import text_of
from verl.errors import DataError
from verl.metrics import notice

FIRST_ROWS = 32
QUOTES = "\"'`\N{LOWER ONE EIGHTH BLOCK}"
"""Signs that tokenizers write in another way; the last one is the space of SentencePiece."""


def check_kept(
    template: ChatTemplate,
    count: int,
    messages_of: Callable[[int], Sequence[Message]],
    describe: Callable[[int], str],
) -> None:
    """Compare the texts of the first of ``count`` rows with what their tokens say.

    Args:
        messages_of: the conversation of a row; one that is refused is passed over, and refused where it is asked for.
        describe: where a row stands.

    Raises:
        DataError: no character of a row has a token. A notice names those that some rows lose.
    """
    found: list[tuple[int, str]] = []
    for row in range(min(count, FIRST_ROWS)):
        try:
            text = "\n".join(text_of(message["content"]) for message in messages_of(row) if message.get("content"))
        except DataError:
            continue
        text = text[:PART]
        lost = lost_characters(text, template.encode_content(text), template.tokenizer)
        if lost and len(lost) == len(_characters(text)):
            raise DataError(
                f"the tokenizer has a token for no character of the text, which begins {text[:40]!r}",
                key=describe(row),
                fix="Use a model whose tokenizer has a byte fallback, or was made for this text.",
            )
        found += [(row, lost)] if lost else []
    if found:
        row, lost = found[0]
        signs = "".join(dict.fromkeys(char for _, signs in found for char in signs))
        notice(
            "tokenizer",
            f"it has no token for some characters, which the model does not see: {signs[:60]!r} in {len(found)} of the "
            f"first {min(count, FIRST_ROWS)} rows. The first is {describe(row)}",
        )


def lost_characters(text: str, ids: Sequence[int], tokenizer: Any) -> str:
    """The characters of a text that its ids do not hold, in order, each as often as it is lost."""
    known = [number for number in ids if number != tokenizer.unk_token_id]
    decoded = tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    missing = Counter(_characters(text)) - Counter(_characters(decoded))
    lost = []
    for char in _characters(text):
        if missing[char]:
            missing[char] -= 1
            lost.append(char)
    return "".join(lost)


def _characters(text: str) -> str:
    """A text in the form in which it is compared: without case, accents, spaces, control characters and quotes."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(c for c in folded if unicodedata.category(c) not in IGNORED and c not in QUOTES)


IGNORED = ("Mn", "Me", "Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp", "Pi", "Pf")

"""Text that a tokenizer cannot represent: without a byte fallback it vanishes silently.

The first rows are encoded and decoded again, and their characters compared. What tokenizers change on purpose (case,
accents, compatible forms, spaces, quotes) is no loss.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from verl.data.chat_template import ChatTemplate
from verl.data.messages import Message
from verl.data.overlong import PART
from verl.data.vision.parts import text_of
from verl.errors import DataError
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.protocol.tokenizer import Tokenizer

FIRST_ROWS = 32
IGNORED = re.compile("C|Z|M[ne]|P[if]")
"""Categories of Unicode: control characters, spaces, accents and quotes."""
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
        messages_of: the conversation of a row; one that is refused is passed over: its reader refuses it.

    Raises:
        DataError: no character of a row has a token. A notice names those that some rows lose.
    """
    losing: list[tuple[int, str]] = []
    looked_at = min(count, FIRST_ROWS)
    for row in range(looked_at):
        try:
            text = "\n".join(text_of(message.get("content") or "") for message in messages_of(row))[:PART]
        except DataError:
            continue
        lost = lost_characters(text, template.encode_content(text), template.tokenizer)
        if lost and len(lost) == len(_characters(text)):
            fix = "Use a model whose tokenizer has a byte fallback, or was made for this text."
            fault = f"the tokenizer has a token for no character of the text, which begins {text[:40]!r}"
            raise DataError(fault, key=describe(row), fix=fix)
        if lost:
            losing.append((row, "".join(char for char in text if set(_characters(char)) & set(lost))))
    if losing:
        row = losing[0][0]
        signs = "".join(dict.fromkeys(char for _, signs in losing for char in signs))[:60]
        where = f"{len(losing)} of the first {looked_at} rows. The first is {describe(row)}"
        notice("tokenizer", f"it has no token for characters that the model then does not see: {signs!r} in {where}")


def lost_characters(text: str, ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The characters of a text that its ids do not hold, each as often as it is lost."""
    encoded = [number for number in ids if number != tokenizer.unk_token_id]
    decoded = tokenizer.decode(encoded, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return "".join((Counter(_characters(text)) - Counter(_characters(decoded))).elements())


def _characters(text: str) -> str:
    """A text in the form in which it is compared: without case, accents, spaces, control characters and quotes."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(c for c in folded if not (c in QUOTES or IGNORED.match(unicodedata.category(c))))

"""What the library takes for a tokenizer, so that rooms without transformers can say what they are handed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of `transformers.PreTrainedTokenizerBase` that the library calls, and all that a user's has to have."""

    name_or_path: str
    chat_template: str | None
    eos_token: str | None
    pad_token: str | None
    bos_token: str | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None
    all_special_tokens: list[str]
    all_special_ids: list[int]
    added_tokens_decoder: Mapping[int, Any]

    def __len__(self) -> int: ...

    def __call__(self, text: str, **arguments: Any) -> Mapping[str, Any]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **arguments: Any) -> str: ...

    def batch_decode(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]: ...

    def convert_tokens_to_ids(self, token: str) -> int: ...

    def convert_ids_to_tokens(self, token_id: int) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def get_added_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **arguments: Any) -> str | list[int]: ...

    def save_pretrained(self, save_directory: str | Path) -> tuple[str, ...]: ...

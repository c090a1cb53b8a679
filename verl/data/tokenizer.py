"""Tokenizers from a model folder or a hub name, made fit for training; and which ids end a turn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl import env
from verl.config.schema.node import full_keys
from verl.errors import ModelError
from verl.metrics import notice
from verl.storage import copy_to_local, expand, is_hub_name, is_remote, missing_path

if TYPE_CHECKING:
    from verl.protocol.tokenizer import Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
VOCABULARY_PAIRS = (("vocab.json", "merges.txt"), ("vocab.txt",))
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
GEMMA_END_OF_TURN = "<end_of_turn>"


def hf_tokenizer(
    name_or_path: str | Path,
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    *,
    custom_chat_template: str | None = None,
    key: str = "name_or_path",
    **kwargs: Any,
) -> Any:
    """The tokenizer of a model folder or a hub name.

    Args:
        name_or_path: a folder (``~`` and variables are expanded), an ``hdfs://`` folder, or ``owner/name`` of the hub.
        correct_pad_token: a tokenizer without a padding token pads with its end-of-sequence token (a notice says so).
        correct_gemma2: a Gemma chat tokenizer that ends with ``<eos>`` gets ``<end_of_turn>``, which ends its turns.
        custom_chat_template: Jinja text, or the path of a file that holds it.
        kwargs: handed to `transformers.AutoTokenizer.from_pretrained` (``trust_remote_code`` and the like).

    Raises:
        ModelError: no such folder, no tokenizer files in it, or the hub did not give it.
    """
    from transformers import AutoTokenizer

    source = source_of(name_or_path, key)
    kwargs.setdefault("trust_remote_code", False)  # unset, transformers would ask at the keyboard and wait
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **kwargs)
    except (OSError, ValueError, ImportError, KeyError) as failure:
        where = "this folder" if Path(source).is_dir() else "this hub name"
        fix = "Check the name and the network, or give a folder on this machine that has the tokenizer's files."
        if "trust_remote_code" in str(failure):
            fix = "It runs code of its own: read it, then set trust_remote_code=true in the model's section."
        raise ModelError(
            f"no tokenizer could be loaded from {where}: {brief(failure)}",
            key=key,
            got=str(name_or_path),
            fix=fix,
        ) from failure
    if custom_chat_template:
        tokenizer.chat_template = _template_text(custom_chat_template)
    if correct_gemma2:
        _end_gemma_turns(tokenizer)
    if correct_pad_token:
        _ensure_pad_token(tokenizer)
    return tokenizer


def tokenizer_of(model: Any) -> Any:
    """The tokenizer of a ``model`` section: of its tokenizer_path, or of its path. Errors name these settings."""
    key = "tokenizer_path" if model.tokenizer_path else "path"
    with full_keys(model):
        return hf_tokenizer(
            model[key],
            key=key,
            trust_remote_code=model.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
        )


def normalize_token_ids(tokenized_output: Any) -> list[int]:
    """One flat list of ids from any form in which a tokenizer may return one sequence.

    Accepts a list, an array or tensor of shape (L,) or (1, L), and mappings that hold it as ``input_ids``.

    Raises:
        ValueError: several sequences, or something that holds no ids.
    """
    from tokenizers import Encoding

    ids = tokenized_output["input_ids"] if isinstance(tokenized_output, Mapping) else tokenized_output
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], Encoding):
        ids = ids[0]
    array = np.asarray(ids.ids if isinstance(ids, Encoding) else ids)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(f"expected the token ids of one sequence, got {tokenized_output!r}")
    return [int(i) for i in array]


def eos_token_ids(tokenizer: Tokenizer, generation_config: Any = None) -> tuple[int, ...]:
    """All ids at which a response ends: the tokenizer's end token first, then those of the generation config.

    Args:
        generation_config: an object or mapping with ``eos_token_id`` (an id, a list of them, or None), or None.
    """
    if isinstance(generation_config, Mapping):
        more = generation_config.get("eos_token_id")
    else:
        more = None if generation_config is None else generation_config.eos_token_id
    listed = [] if more is None else [more] if isinstance(more, int) else list(more)
    default = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(dict.fromkeys(int(i) for i in (*default, *listed)))


def source_of(name_or_path: str | Path, key: str) -> str:
    """The folder or hub name to load from; a folder without tokenizer files is refused here, with their names."""
    text = expand(str(name_or_path).removeprefix("file://"))
    if is_remote(text):
        text = copy_to_local(text, error=ModelError, key=key)
    folder = Path(text)
    if folder.is_dir():
        _check_folder(folder, key)
        return text
    if folder.exists():
        raise ModelError("this is a file; a model is a folder", key=key, got=text)
    if is_hub_name(text):
        # The Hugging Face hub hands out single files; ModelScope's client fetches the folder.
        return copy_to_local(text) if env.get_flag("VERL_USE_MODELSCOPE") else text
    if "/" not in text and not text.startswith("."):
        return text  # the old hub names without an owner, such as gpt2
    raise missing_path(text, error=ModelError, key=key)


def _check_folder(folder: Path, key: str) -> None:
    names = {p.name for p in folder.iterdir()}
    if names & set(TOKENIZER_FILES) or any(set(pair) <= names for pair in VOCABULARY_PAIRS):
        return
    if any(name.startswith("tokenization_") for name in names):
        return  # a tokenizer of the model's own code may keep its vocabulary anywhere
    listed = ", ".join(sorted(names)[:8]) or "nothing"
    raise ModelError(
        "this folder has no tokenizer: tokenizer.json (or tokenizer.model, or vocab.json with merges.txt) is missing",
        key=key,
        got=str(folder),
        fix=f"It has: {listed}. Copy the tokenizer's files there, or set the tokenizer's own path.",
    )


def brief(failure: BaseException) -> str:
    """The kind of a failure with its first line."""
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0][:300]}"


def _template_text(template: str) -> str:
    looks_like_path = "\n" not in template and "{" not in template
    if not looks_like_path:
        return template
    path = Path(expand(template))
    if not path.is_file():
        raise missing_path(path, error=ModelError, key="custom_chat_template")
    return path.read_text(encoding="utf-8")


def _end_gemma_turns(tokenizer: Any) -> None:
    template = tokenizer.chat_template
    uses_it = isinstance(template, str) and GEMMA_END_OF_TURN in template
    if uses_it and tokenizer.eos_token == "<eos>" and GEMMA_END_OF_TURN in tokenizer.get_vocab():
        tokenizer.eos_token = GEMMA_END_OF_TURN
        notice("tokenizer.eos_token", f"Gemma's turns end with {GEMMA_END_OF_TURN}, so it ends a response, not <eos>")


def _ensure_pad_token(tokenizer: Any) -> None:
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has neither a padding nor an end-of-sequence token",
            got=tokenizer.name_or_path,
            fix="Set pad_token or eos_token in its tokenizer_config.json.",
        )
    tokenizer.pad_token = tokenizer.eos_token
    notice("tokenizer.pad_token", f"the tokenizer has none; {tokenizer.eos_token!r}, its end token, is used")

"""The real chat templates, each with a trained tokenizer that has its family's special tokens as single ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps in the shade of a tree.",
    "system user assistant model tool You are a helpful assistant created by the people who wrote this.",
    "1+1? and 3? 5 it is. What is the sum of these two numbers? It is forty two.\n\nBecause I said so.\n",
    "\n\n\n \n\n",
] * 8

# How today's tokenizers cut text before merging: words, digits, punctuation, and newlines with what precedes them.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    """What a tokenizer of the family needs; ``pretty`` marks a template that is stored with indentation."""

    file: str
    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    pretty: bool = False


FAMILIES = {
    "qwen2.5": Family(
        "qwen2.5-instruct",
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
        "<|im_end|>",
    ),
    "qwen3": Family(
        "qwen3",
        (
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "</tool_response>",
            "<think>",
            "</think>",
        ),
        "<|im_end|>",
    ),
    "llama-3": Family(
        "llama-3-instruct",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
        pretty=True,
    ),
    "gemma": Family(
        "gemma-it", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", bos="<bos>", pretty=True
    ),
    "mistral": Family("mistral-instruct", ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", bos="<s>", pretty=True),
    "kimi-k2": Family(
        "kimi-k2",
        (
            "[EOS]",
            "<|im_system|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_middle|>",
            "<|im_end|>",
            "<|media_start|>",
            "<|media_content|>",
            "<|media_end|>",
            "<|media_pad|>",
        ),
        "[EOS]",
    ),
}


def family_template(shared: Path, name: str) -> str:
    """The template's text, ready for use."""
    family = FAMILIES[name]
    text = (shared / "data" / "chat_templates" / f"{family.file}.jinja").read_text(encoding="utf-8")
    return text.replace("    ", "").replace("\n", "") if family.pretty else text


def family_tokenizer(shared: Path, name: str) -> Any:
    """A byte-level BPE tokenizer with about a hundred merges, so that texts do merge across careless boundaries."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=list(family.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.special[0],
        chat_template=family_template(shared, name),
    )

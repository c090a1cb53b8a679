"""Builds the quickstart's model from nothing: a trained tokenizer, a chat template and a small Qwen2.

python examples/quickstart/model.py outputs/quickstart/base
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ("<|pad|>", "<|end|>", "<|unknown|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A BPE trained on sums. Every digit stays a token of its own, and there is nothing in it that sums do not need:
    with hundreds of unused tokens the model learns several times slower.
    """
    rng = random.Random(seed)
    backend = Tokenizer(models.BPE(unk_token="<|unknown|>"))
    backend.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    backend.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(special_tokens=list(SPECIAL), show_progress=False)
    backend.train_from_iterator((f"{rng.randrange(100)}+{rng.randrange(100)}=" for _ in range(1000)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Wide and shallow: on carries, two layers of this width learn several times faster than four narrow ones."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=1152,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a new one-million-parameter Qwen2 with its tokenizer.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = train_tokenizer(arguments.seed)
    model = build_model(tokenizer, arguments.seed)
    tokenizer.save_pretrained(arguments.folder)
    model.save_pretrained(arguments.folder)
    print(f"wrote {arguments.folder}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()

"""Makes what the calculator example needs: a small model with its tokenizer, demonstrations, prompts.

The task is to multiply two numbers of two digits, which a model of this size cannot do. It has a calculator; in the
demonstrations one pupil in four uses it, the others guess. Reinforcement learning has to find out what to do.

    python examples/calculator/make.py outputs/calculator
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL = ("<|pad|>", "<|end|>", "<|unknown|>", *ROLES)
BEFORE, AFTER = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LOW, HIGH = 32, 100
"""From 32 on every product has four digits."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per digit and sign, and one for each end of a call, so that a call takes seven tokens."""
    tokens = [*SPECIAL, *"0123456789*"]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token="<|unknown|>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in (BEFORE, AFTER)])
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Two layers are enough to copy digits from a question into a call, and from an answer into a result."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def demonstration(a: int, b: int, guess: int, uses_tool: bool) -> dict[str, Any]:
    """A conversation with a call, or with a guess of the right size."""
    question = {"role": "user", "content": f"{a}*{b}"}
    if not uses_tool:
        return {"messages": [question, {"role": "assistant", "content": str(guess)}]}
    call = {"role": "assistant", "content": f"{BEFORE}{a}*{b}{AFTER}"}
    answer = {"role": "tool", "content": str(a * b)}
    return {"messages": [question, call, answer, {"role": "assistant", "content": str(a * b)}]}


def prompt(a: int, b: int, index: int) -> dict[str, Any]:
    return {
        "data_source": "products",
        "prompt": [{"role": "user", "content": f"{a}*{b}"}],
        "reward_model": {"style": "rule", "ground_truth": str(a * b)},
        "extra_info": {"index": index},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write model, demonstrations and prompts of the calculator example.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--calls", type=float, default=0.25, help="share of demonstrations that use the calculator")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder, rng = arguments.folder, random.Random(arguments.seed)
    pairs = [(a, b) for a in range(LOW, HIGH) for b in range(LOW, HIGH)]
    rng.shuffle(pairs)
    train, test, sft = pairs[:1024], pairs[1024:1152], pairs[1152:]
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        demonstration(a, b, guess=(a + rng.randrange(-3, 4)) * b, uses_tool=rng.random() < arguments.calls)
        for a, b in sft
    ]
    pd.DataFrame(rows).to_parquet(folder / "sft.parquet")
    for name, part in (("train", train), ("test", test)):
        pd.DataFrame([prompt(a, b, i) for i, (a, b) in enumerate(part)]).to_parquet(folder / f"{name}.parquet")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "base")
    make_model(tokenizer).save_pretrained(folder / "base")
    print(json.dumps({"train": len(train), "test": len(test), "demonstrations": len(sft), "tokens": len(tokenizer)}))


if __name__ == "__main__":
    main()

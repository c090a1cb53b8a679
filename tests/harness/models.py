"""Small real models: a byte-level tokenizer, and folders of randomly initialised language models."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def tiny_tokenizer(folder: str | Path | None = None) -> Any:
    """A byte-level tokenizer (259 tokens: any text, one digit is one token) with a chat template.

    The end-of-sequence token is ``<|im_end|>``, the padding token ``<|endoftext|>``. Written to ``folder`` if given.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    if folder is not None:
        tokenizer.save_pretrained(folder)
    return tokenizer


def tiny_model_dir(
    folder: str | Path,
    family: str = "qwen2",
    *,
    vocab: int = VOCAB_SIZE,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 1024,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A complete Hugging Face folder of a randomly initialised causal language model with tokenizer and chat template.

    Each is made once per process; a test gets a copy, which it may change.

    Args:
        family: any ``model_type`` of transformers whose configuration takes the usual names (qwen2, qwen3, llama, ...).
        config: further fields of the configuration (``tie_word_embeddings=True``, ...).
    """
    settings = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": max_positions,
        "bos_token_id": None,
        **config,
    }
    key = json.dumps([family, seed, settings], sort_keys=True, default=repr)
    with _making:
        if key not in _made:
            _made[key] = Path(_store(), f"{os.getpid()}-{len(_made)}")  # a fork has the store of its parent
            _make(_made[key], family, seed, settings)
    shutil.copytree(_made[key], folder, copy_function=shutil.copy, dirs_exist_ok=True)
    return Path(folder)


_made: dict[str, Path] = {}
_making = threading.Lock()  # threads that prepare runs at the same time get one that is complete


@functools.cache
def _store() -> str:
    """A folder of this process, which goes with it."""
    folder, owner = tempfile.mkdtemp(prefix="tiny_models"), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return folder


def _make(folder: Path, family: str, seed: int, settings: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **{**ends, **settings})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)

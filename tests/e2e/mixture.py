"""A mixture of experts that can add, for the learning tests: a dense model's MLPs, copied (arXiv:2212.05055).

A mixture learns sums from nothing several times slower than a dense model does. Copies of one MLP, weighted to one, are
that MLP, so the mixture starts where the dense model ended; a little noise lets its experts differ.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERTS, CHOSEN, NOISE = 4, 2, 0.02
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 1152,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}


def write_dense(folder: Path, like: Path, seed: int = 0) -> None:
    """A new Qwen3 of the quickstart's size, with the tokenizer of another folder."""
    tokenizer = AutoTokenizer.from_pretrained(like)
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, **_tokens(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_mixture(folder: Path, dense: Path, seed: int = 0) -> None:
    """A Qwen3-MoE whose experts are the dense model's MLPs."""
    tokenizer = AutoTokenizer.from_pretrained(dense)
    source = Qwen3ForCausalLM.from_pretrained(dense)
    given, shape = source.state_dict(), {name: getattr(source.config, name) for name in SHAPE}
    torch.manual_seed(seed)
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True}
    width = {"moe_intermediate_size": shape["intermediate_size"]}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **sizes, **width, **_tokens(tokenizer)))
    with torch.no_grad():
        for name, target in model.state_dict().items():
            prefix, _, last = name.rpartition(".experts.")
            if last == "gate_up_proj":
                _copies(target, torch.cat([given[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up")]))
            elif last == "down_proj":
                _copies(target, given[f"{prefix}.down_proj.weight"])
            elif name in given:
                target.copy_(given[name])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _copies(experts: torch.Tensor, weight: torch.Tensor) -> None:
    experts.copy_(weight.expand_as(experts) + NOISE * weight.std() * torch.randn_like(experts))


def _tokens(tokenizer: object) -> dict[str, int]:
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }

"""Floating-point operations of a model, for ``perf/mfu``.

Convention (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): a multiply-add counts two; a training step costs three
forward passes and recomputation is not credited; attention is counted over the full square of the context, causality is
NOT credited, a sliding window is; the embedding look-up is free and the language-model head counts on every token, also
where this library skips it. Per token: 6 * (active matmul parameters) + 12 * layers * heads * head_dim * context.
Here the language model is counted, on all its tokens; `verl.models.vision.tower_flops` counts a tower.
Families whose configuration has the usual names are counted exactly; for others the parameter count stands in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


DENSE_FAMILIES = frozenset(
    (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "granite",
        "smollm3",
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen3_vl_text",
    )
)
MOE_FAMILIES = frozenset(("mixtral", "qwen2_moe", "qwen3_moe"))
LATENT_FAMILIES = frozenset(("deepseek_v2", "deepseek_v3"))
"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), the first layers dense."""
PEAK_BF16 = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "MI300X": 1307e12,
    "MI250": 362e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
}
"""Dense bf16 (V100: fp16) operations per second, from the vendors' data sheets."""


@dataclass(frozen=True)
class ModelFlops:
    """Operations of one model.

    Args:
        matmul_parameters: weights that one token is multiplied with (of a mixture, the active experts).
        attention_width: heads times head dimension.
        windows: per layer the attention window, None where it is the whole context.
        exact: False where the count rests on the number of parameters alone.

    Example:
        >>> ModelFlops.of(config).train([512] * 64) / seconds / device_peak_flops("NVIDIA H100")
    """

    matmul_parameters: int
    attention_width: int
    windows: tuple[int | None, ...]
    exact: bool = True

    @classmethod
    def of(cls, config: PretrainedConfig, num_parameters: int | None = None) -> ModelFlops:
        """From a transformers configuration; ``num_parameters`` is used for families that are not known here."""
        text = config.get_text_config()
        c = text.to_dict()
        c |= {name: c[a] for name, a in text.attribute_map.items() if a in c}  # gpt2's n_embd is hidden_size
        width = c["num_attention_heads"] * _head_dim(c)
        head = c["hidden_size"] * c["vocab_size"]
        if c["model_type"] in LATENT_FAMILIES:
            per_layer = c["num_hidden_layers"] * _latent_attention(c)
            # Scores are as wide as queries, mixing as wide as values; the convention counts the two as one width.
            both = c["num_attention_heads"] * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"] + c["v_head_dim"]) // 2
            return cls(per_layer + _latent_mlp(c) + head, both, _windows(c))
        if c["model_type"] in DENSE_FAMILIES | MOE_FAMILIES:
            return cls(_attention(c) * c["num_hidden_layers"] + _mlp(c) + head, width, _windows(c))
        embeddings = c["hidden_size"] * c["vocab_size"] * (1 if c.get("tie_word_embeddings", True) else 2)
        return cls(max(0, (num_parameters or 0) - embeddings) + head, width, _windows(c), exact=False)

    def forward(self, lengths: Iterable[int]) -> float:
        """Operations of one forward pass over sequences of these lengths."""
        total = 0.0
        for length in lengths:
            context = sum(min(length, window) if window else length for window in self.windows)
            total += 2.0 * self.matmul_parameters * length + 4.0 * self.attention_width * context * length
        return total

    def train(self, lengths: Iterable[int]) -> float:
        """Operations of forward and backward: three forward passes."""
        return 3.0 * self.forward(lengths)


def device_peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak by the name that ``torch.cuda.get_device_name`` gives; None for unknown devices and CPUs."""
    name = device_name.upper().replace("-", " ").replace("_", " ")
    words = set(name.split())
    for key, peak in PEAK_BF16.items():
        if any(word.startswith(key) and not word[len(key) : len(key) + 1].isdigit() for word in words):
            return peak
    return None


def _head_dim(c: dict[str, Any]) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def _attention(c: dict[str, Any]) -> int:
    kv_heads = c.get("num_key_value_heads") or c["num_attention_heads"]
    return c["hidden_size"] * _head_dim(c) * (2 * c["num_attention_heads"] + 2 * kv_heads)


def _latent_attention(c: dict[str, Any]) -> int:
    """Weights of one layer: queries (through a bottleneck where there is one), compressed keys and values, output."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    query_width = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    narrow = c.get("q_lora_rank")
    queries = hidden * narrow + narrow * query_width if narrow else hidden * query_width
    down = hidden * (c["kv_lora_rank"] + c["qk_rope_head_dim"])
    up = c["kv_lora_rank"] * heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
    return queries + down + up + heads * c["v_head_dim"] * hidden


def _latent_mlp(c: dict[str, Any]) -> int:
    """Feed-forward weights of all layers: dense ones first, then router, chosen and shared experts."""
    hidden, dense = c["hidden_size"], min(c.get("first_k_dense_replace") or 0, c["num_hidden_layers"])
    active = c["num_experts_per_tok"] + (c.get("n_shared_experts") or 0)
    sparse = hidden * c["n_routed_experts"] + 3 * hidden * c["moe_intermediate_size"] * active
    return dense * 3 * hidden * c["intermediate_size"] + (c["num_hidden_layers"] - dense) * sparse


def _mlp(c: dict[str, Any]) -> int:
    """Gated feed-forward weights of all layers; of a mixture the router, the chosen and the shared experts."""
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    dense = 3 * hidden * c["intermediate_size"]
    if c["model_type"] not in MOE_FAMILIES:
        return layers * dense
    experts = c.get("num_experts") or c.get("num_local_experts")
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    shared = c.get("shared_expert_intermediate_size") or 0
    sparse = hidden * experts + 3 * hidden * (c["num_experts_per_tok"] * width + shared) + (hidden if shared else 0)
    dense_layers = set(c.get("mlp_only_layers") or ())
    step = c.get("decoder_sparse_step") or 1
    is_dense = [i in dense_layers or (i + 1) % step != 0 for i in range(layers)]
    return sum(dense if flag else sparse for flag in is_dense)


def _windows(c: dict[str, Any]) -> tuple[int | None, ...]:
    types = c.get("layer_types") or ["full_attention"] * c["num_hidden_layers"]
    return tuple(c.get("sliding_window") if kind == "sliding_attention" else None for kind in types)

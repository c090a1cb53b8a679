"""Floating-point operations of a model, for ``perf/mfu``.

Convention (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): a multiply-add counts two; a training step costs three
forward passes and recomputation is not credited; attention is counted over the full square of the context, causality is
NOT credited, a sliding window is; the embedding look-up is free and the language-model head counts on every token, also
where this library skips it. Per token: 6 * (active matmul parameters) + 12 * layers * heads * head_dim * context.
Here the language model is counted, on all its tokens; `verl.models.vision.tower_flops` counts a tower.
Families of the planner are counted exactly; for others the parameter count stands in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.planner.hardware import all_devices
from verl.planner.shapes import FAMILIES, ModelShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig


PEAK_BF16 = {name: entry.bf16_flops for name, entry in all_devices().items() if not entry.is_cpu} | {
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "MI250": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
}
"""Dense bf16 (V100: fp16) operations per second: those of `hardware.yaml`, and others from their data sheets."""


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
        if c["model_type"] in FAMILIES:
            shape = ModelShape.from_config(c)
            windows = tuple(block.window for block in shape.blocks)
            # Scores are as wide as queries, mixing as wide as values; the convention counts the two as one width.
            return cls(shape.active_parameters, (shape.blocks[0].scores + shape.blocks[0].mixed) // 2, windows)
        width = c["num_attention_heads"] * (c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])
        types = c.get("layer_types") or ["full_attention"] * c["num_hidden_layers"]
        windows = tuple(c.get("sliding_window") if kind == "sliding_attention" else None for kind in types)
        embeddings = c["hidden_size"] * c["vocab_size"] * (1 if c.get("tie_word_embeddings", True) else 2)
        head = c["hidden_size"] * c["vocab_size"]
        return cls(max(0, (num_parameters or 0) - embeddings) + head, width, windows, exact=False)

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

"""The layouts in which Megatron-Core equals the plain engine: rows of the tests and of `docs/appendix/parity.md`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.megatron.adapter_cells import COMPLETE, EXPERTS, beside_plain
from tests.megatron.cells import CONTEXT, EXPERT, PIPELINE, TENSOR, VIRTUAL, compared
from tests.megatron.families import GEMMA2, GEMMA3, GLM, GLM4, LATENT, LLAMA3, MIXTRAL, MIXTURE, MOONLIGHT, YARN
from verl.config.schema.role import MegatronEngineOverrideTransformerConfigConfig
from verl.distributed import Ranks

SHORT = {
    TENSOR: "tp",
    PIPELINE: "pp",
    VIRTUAL: "vpp",
    CONTEXT: "cp",
    EXPERT: "ep",
    "expert_tensor_parallel_size": "etp",
}
RECOMPUTED = {"override_transformer_config": MegatronEngineOverrideTransformerConfigConfig("full")}
FIELDS = "override_mcore_model_config"
FIRST_HAS_ONE = {PIPELINE: 2, FIELDS: {"num_layers_in_first_pipeline_stage": 1}}
LAST_HAS_ONE_LESS = {PIPELINE: 2, FIELDS: {"account_for_loss_in_pipeline_split": True}}
LISTED = {PIPELINE: 2, FIELDS: {"pipeline_model_parallel_layout": "E|t|tt|L"}}
"""Two groups of layers per stage; the first and the last group have none."""
ERRORS = ("outputs", "loss", "norm", "weights", "routers", "adapter", "merged")
"""The relative errors among the findings of a cell."""


@dataclass(frozen=True)
class Cell:
    """Three optimizer steps in one layout, compared with the plain engine.

    Args:
        name: of the test.
        family, config: of the model.
        sizes: settings of the engine.
        rows: of a micro-batch; None: the engine's choice.
        model: settings of the model.
        constant: rows whose advantage is 0.
        compare: with all weights trained, or with an adapter.
    """

    name: str
    family: str = "qwen2"
    config: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "causal_lm"
    rows: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    constant: tuple[int, ...] = ()
    compare: Callable[..., dict[str, Any]] = compared

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, ranks: Ranks, folder: Path) -> dict[str, Any]:
        limits = {} if self.rows is None else {"micro_batch_size": self.rows}
        constant = {"constant": self.constant} if self.constant else {}
        settings = {"config": dict(self.config), "limits": limits, "model": dict(self.model), **constant}
        return self.compare(ranks, folder, self.family, self.kind, **settings, **self.sizes)

    @property
    def layout(self) -> str:
        """The sizes in the field's short names, ``sp`` with sequence parallel; ``dp`` where ranks only share rows."""
        words = [f"{short} {self.sizes[name]}" for name, short in SHORT.items() if name in self.sizes]
        words += ["sp"] if TENSOR in self.sizes and self.sizes.get("sequence_parallel", True) else []
        words += ["recomputed"] if "override_transformer_config" in self.sizes else []
        words += ["uneven stages"] if FIELDS in self.sizes else []
        return ", ".join(words) or "dp"

    @property
    def trained(self) -> str:
        parts = "experts' LoRA" if self.model.get("target_parameters") else "LoRA"
        words = ["all weights" if self.compare is compared else parts]
        words += ["value head"] if self.kind == "value" else []
        words += ["padded rows"] if self.model.get("use_remove_padding") is False else []
        words += ["rows without a gradient"] if self.constant else []
        return ", ".join(words)


def adapted(name: str, family: str = "qwen2", config: Mapping[str, Any] | None = None, **settings: Any) -> Cell:
    return Cell(name, family, config or {}, compare=beside_plain, **settings)


PADDED = {"use_remove_padding": False}
SHARED = {CONTEXT: 2}
PARITY = {
    2: [
        Cell("tensor_parallel", sizes={TENSOR: 2, "sequence_parallel": False}, rows=2),
        # Heads that are wider than hidden / heads.
        Cell("tensor_and_sequence_parallel", "qwen3", {"head_dim": 16}, {TENSOR: 2}),
        Cell("pipeline_parallel", "llama", {"rope_parameters": LLAMA3}, {PIPELINE: 2}, rows=2),
        # Three micro-batches are left of five.
        Cell("rows_without_a_gradient", sizes={PIPELINE: 2}, rows=1, constant=(0, 2)),
        # Three micro-batches, which the schedule wants to be four.
        Cell("pipeline_with_virtual_stages", "qwen2", {"layers": 4}, {PIPELINE: 2, VIRTUAL: 2}, rows=3),
        Cell("stages_of_other_lengths", "qwen3", {"layers": 3}, FIRST_HAS_ONE, rows=2),
        Cell("stages_by_a_layout", "llama", {"layers": 3, "tie_word_embeddings": True}, LISTED, rows=2),
        Cell("a_mixture_over_stages_of_other_lengths", "glm4_moe", {**GLM, "layers": 3}, LAST_HAS_ONE_LESS, rows=3),
        Cell("a_value_model", sizes={TENSOR: 2}, kind="value"),
        Cell("experts_shared", "qwen3_moe", MIXTURE, {EXPERT: 2}, rows=2),
        # Attention over two ranks, each expert complete on one of them: tokens go to their experts and back.
        Cell("experts_cut_otherwise_than_the_rest", "qwen3_moe", MIXTURE, {**COMPLETE, EXPERT: 2}, rows=3),
        Cell("latent_attention_and_experts_shared", "deepseek_v3", {**LATENT, "rope_parameters": YARN}, {EXPERT: 2}),
        Cell("latent_attention_cut", "deepseek_v3", LATENT, {TENSOR: 2}, rows=2),
        Cell("latent_queries_as_they_are", "deepseek_v3", {**LATENT, "q_lora_rank": None}, {PIPELINE: 2}),
        Cell("data_parallel_with_the_distributed_optimizer", "mistral", {"sliding_window": 3}),
        # Two ranks share 259 tokens; the embedding is the head.
        Cell("vocabulary_in_odd_parts", config={"tie_word_embeddings": True}, sizes={TENSOR: 2}),
        Cell("tokens_shared_by_two", sizes=SHARED, rows=3),
        Cell("experts_and_tokens_shared_by_two", "qwen3_moe", MIXTURE, {**SHARED, EXPERT: 2}, rows=4),
        Cell("tokens_of_latent_attention_shared", "deepseek_v3", {**LATENT, "rope_parameters": YARN}, SHARED),
        # Layers that look back at two tokens.
        Cell("rows_padded_as_asked_for", "mistral", {"sliding_window": 3}, {TENSOR: 2}, rows=3, model=PADDED),
        Cell("a_mixtral_whose_tokens_are_shared", "mixtral", MIXTRAL, SHARED),
        Cell("a_glm_mixture_whose_tokens_are_shared", "glm4_moe", GLM, {**SHARED, EXPERT: 2}),
        Cell("a_gemma_whose_tokens_are_shared", "gemma", {"tie_word_embeddings": True}, SHARED),
        Cell("a_gemma2_cut", "gemma2", GEMMA2, {TENSOR: 2, **RECOMPUTED}),
        Cell("a_gemma3_cut", "gemma3_text", GEMMA3, {TENSOR: 2, **RECOMPUTED}),
        Cell("a_gemma3_on_padded_rows_over_stages", "gemma3_text", GEMMA3, {PIPELINE: 2}, model=PADDED),
        Cell("a_gemma2_whose_tokens_are_shared", "gemma2", GEMMA2, SHARED),
        Cell("a_moonlight_cut", "deepseek_v3", MOONLIGHT, {TENSOR: 2}),
        Cell("a_glm_cut", "glm4", GLM4, {TENSOR: 2, **RECOMPUTED}),
        Cell("a_glm_whose_tokens_are_shared", "glm4", GLM4, SHARED, rows=3),
        Cell(
            "a_glm_on_padded_rows_over_stages",
            "glm4",
            {**GLM4, "attention_bias": False},
            {PIPELINE: 2},
            kind="value",
            model=PADDED,
        ),
    ],
    4: [
        Cell("tensor_and_pipeline_parallel", "qwen2", {"tie_word_embeddings": True}, {TENSOR: 2, PIPELINE: 2}, rows=2),
        Cell("tensor_parallel_and_virtual_stages", "llama", {"layers": 4}, {TENSOR: 2, PIPELINE: 2, VIRTUAL: 2}),
        Cell("tensor_and_data_parallel", "qwen3", sizes={TENSOR: 2}),
        # Two KV heads, which four ranks look at.
        Cell("tokens_shared_by_four", "llama", sizes={CONTEXT: 4}),
        Cell("tokens_and_layers_shared", sizes={**SHARED, TENSOR: 2}, rows=3),
        # Three micro-batches, which the schedule wants to be four.
        Cell(
            "tokens_shared_over_virtual_stages",
            config={"layers": 4},
            sizes={**SHARED, PIPELINE: 2, VIRTUAL: 2, **RECOMPUTED},
            rows=3,
        ),
        # Two groups of two processes, each with rows of its own.
        Cell("tokens_shared_beside_copies", "qwen3_moe", MIXTURE, {**SHARED, EXPERT: 4}),
    ],
}
SOME = {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
"""Queries and values without keys, up without gate."""
LAST = {"target_modules": r".*layers\.3\.(self_attn|mlp)\..*_proj"}
"""The first stages train nothing."""
ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
STAGES_OF_EXPERTS = {**EXPERTS, "target_parameters": ["mlp.experts.down_proj"]}
ADAPTERS = {
    2: [
        adapted("adapters_on_tensor_and_sequence_parallel_layers", sizes={TENSOR: 2}, rows=3),
        adapted(
            "adapters_on_some_modules",
            "qwen3",
            {"head_dim": 16},
            sizes={TENSOR: 2, "sequence_parallel": False, **RECOMPUTED},
            model=SOME,
        ),
        adapted(
            "adapters_on_pipeline_stages", config={"layers": 4}, sizes={PIPELINE: 2, VIRTUAL: 2}, rows=2, model=LAST
        ),
        adapted("adapters_on_stages_of_other_lengths", config={"layers": 3}, sizes=LAST_HAS_ONE_LESS, rows=2),
        adapted("adapters_of_a_value_model", sizes={PIPELINE: 2}, kind="value"),
        # Data parallel, with the optimizer's state sharded over the two.
        adapted("adapters_on_copies"),
        adapted("adapters_on_shared_tokens", sizes=SHARED, rows=3),
        adapted("adapters_on_the_attention_of_a_mixture", "qwen3_moe", MIXTURE, sizes={EXPERT: 2}, model=ATTENTION),
        # Gate and up are one linear layer there, with one pair of factors.
        adapted("adapters_on_a_glm", "glm4", GLM4, sizes={TENSOR: 2}),
        adapted("adapters_on_experts_that_are_shared", "qwen3_moe", MIXTURE, sizes={EXPERT: 2}, model=EXPERTS),
        adapted("adapters_on_experts_beside_cut_attention", "mixtral", MIXTRAL, sizes=COMPLETE, rows=3, model=EXPERTS),
        # Of which one layer has no experts.
        adapted(
            "adapters_on_experts_of_pipeline_stages",
            "glm4_moe",
            GLM,
            sizes={PIPELINE: 2, **RECOMPUTED},
            model=STAGES_OF_EXPERTS,
        ),
    ],
    4: [adapted("adapters_on_tensor_parallel_pipeline_stages", sizes={TENSOR: 2, PIPELINE: 2}, rows=2)],
}

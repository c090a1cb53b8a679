"""What every rank does with packed rows whose tokens several ranks share, beside the plain engine."""

from __future__ import annotations

from tests.megatron.cells import EXPERT, PIPELINE, TENSOR, VIRTUAL, compared
from tests.megatron.families import GEMMA2, GEMMA3, GLM, LATENT, MIXTRAL, MIXTURE, MOONLIGHT, YARN
from verl.config.megatron import MegatronEngineOverrideTransformerConfigConfig

CONTEXT = "context_parallel_size"


# ---- two ranks -------------------------------------------------------------------------------------------------


def tokens_shared_by_two(ranks, folder):
    return compared(ranks, folder, limits={"micro_batch_size": 3}, **{CONTEXT: 2})


def experts_and_tokens_shared_by_two(ranks, folder):
    return compared(
        ranks, folder, "qwen3_moe", config=MIXTURE, limits={"micro_batch_size": 4}, **{CONTEXT: 2, EXPERT: 2}
    )


def a_mixtral_whose_tokens_are_shared(ranks, folder):
    return compared(ranks, folder, "mixtral", config=MIXTRAL, **{CONTEXT: 2})


def a_glm_mixture_whose_tokens_are_shared(ranks, folder):
    return compared(ranks, folder, "glm4_moe", config=GLM, **{CONTEXT: 2, EXPERT: 2})


def a_gemma2_cut(ranks, folder):
    """Tensor and sequence parallel; every layer is computed again."""
    again = {"override_transformer_config": MegatronEngineOverrideTransformerConfigConfig("full")}
    return compared(ranks, folder, "gemma2", config=GEMMA2, **{TENSOR: 2}, **again)


def a_gemma2_whose_tokens_are_shared(ranks, folder):
    return compared(ranks, folder, "gemma2", config=GEMMA2, **{CONTEXT: 2})


def a_gemma3_cut(ranks, folder):
    """Tensor and sequence parallel; every layer is computed again."""
    again = {"override_transformer_config": MegatronEngineOverrideTransformerConfigConfig("full")}
    return compared(ranks, folder, "gemma3_text", config=GEMMA3, **{TENSOR: 2}, **again)


def a_gemma3_on_padded_rows_over_stages(ranks, folder):
    return compared(ranks, folder, "gemma3_text", config=GEMMA3, model={"use_remove_padding": False}, **{PIPELINE: 2})


def a_gemma_whose_tokens_are_shared(ranks, folder):
    return compared(ranks, folder, "gemma", config={"tie_word_embeddings": True}, **{CONTEXT: 2})


def a_moonlight_cut(ranks, folder):
    return compared(ranks, folder, "deepseek_v3", config=MOONLIGHT, **{TENSOR: 2})


def tokens_of_latent_attention_shared(ranks, folder):
    return compared(ranks, folder, "deepseek_v3", config={**LATENT, "rope_parameters": YARN}, **{CONTEXT: 2})


def rows_padded_as_asked_for(ranks, folder):
    """Layers that look back at two tokens."""
    padded, limits = {"use_remove_padding": False}, {"micro_batch_size": 3}
    return compared(ranks, folder, "mistral", config={"sliding_window": 3}, model=padded, limits=limits, **{TENSOR: 2})


# ---- four ranks ------------------------------------------------------------------------------------------------


def tokens_shared_by_four(ranks, folder):
    """Two KV heads, which four ranks look at."""
    return compared(ranks, folder, "llama", **{CONTEXT: 4})


def tokens_and_layers_shared(ranks, folder):
    return compared(ranks, folder, limits={"micro_batch_size": 3}, **{CONTEXT: 2, TENSOR: 2})


def tokens_shared_over_virtual_stages(ranks, folder):
    """Three micro-batches, which the schedule wants to be four; layers are computed again."""
    again = {"override_transformer_config": MegatronEngineOverrideTransformerConfigConfig("full")}
    sizes = {CONTEXT: 2, PIPELINE: 2, VIRTUAL: 2}
    return compared(ranks, folder, config={"layers": 4}, limits={"micro_batch_size": 3}, **sizes, **again)


def tokens_shared_beside_copies(ranks, folder):
    """Two groups of two processes, each with rows of its own."""
    return compared(ranks, folder, "qwen3_moe", config=MIXTURE, **{CONTEXT: 2, EXPERT: 4})

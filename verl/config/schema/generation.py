"""Settings of batch generation (`python -m verl.trainer.main_generation`)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.bounds import AMOUNT, COUNT, PORTION, TOP_K, ValueBound
from verl.config.schema.images import ImageDataConfig
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.rollout import RolloutConfig


@dataclass(frozen=True)
class GenerationDataConfig(ImageDataConfig):
    """Prompts, answers per prompt, and the output file."""

    path: str | list = setting(
        "~/data/rlhf/math/test.parquet", "parquet, json or jsonl file of prompts, or a list of them", path=True
    )
    prompt_key: str = setting(
        "prompt", "column with the prompt: chat messages, or a text that becomes a user's message"
    )
    n_samples: int = setting(
        5, "answers per prompt", within=ValueBound("1 to 100000", lambda count: 1 <= count <= 100_000)
    )
    output_path: str = setting(
        "~/data/math_Qwen2-7B-Instruct.parquet",
        "parquet file to write: all columns, and the column responses",
        path=True,
    )
    batch_size: int = setting(128, "prompts sampled at once", within=COUNT)
    truncation: str = setting(
        "left",
        "what to do with a prompt longer than rollout.prompt_length: left, right, middle truncate there; error stops the run",
        upstream=ABSENT,
        choices=("error", "left", "right", "middle"),
    )


@dataclass(frozen=True)
class GenerationTrainerConfig(ConfigNode):
    """The machine."""

    device: str | None = setting(
        None,
        "cuda, npu or cpu; null or auto: the accelerator if there is one",
        upstream="cuda",
        choices=("auto", "cuda", "npu", "cpu"),
    )
    seed: int = setting(1, "seed of this process", upstream=ABSENT)


@dataclass(frozen=True)
class GenerationRolloutConfig(RolloutConfig):
    """Sampling of answers."""

    nnodes: int = setting(
        0, "machines of the samplers' own pool", planned="batch generation over several nodes", upstream=0
    )
    n_gpus_per_node: int | None = setting(
        None,
        "processes per machine of that pool",
        upstream=8,
        planned="batch generation on several GPUs by one command",
    )
    temperature: float = setting(
        1.0, "sampling temperature; all log-probs are computed at this temperature", within=AMOUNT
    )
    top_k: int = setting(50, "sample from the k most probable tokens; -1: all", within=TOP_K)
    top_p: float = setting(
        0.7, "nucleus sampling: cumulative probability to sample from; 1: all tokens", within=PORTION
    )
    prompt_length: int = setting(1536, "maximum prompt length in tokens", within=COUNT)
    response_length: int = setting(512, "maximum answer length in tokens", within=COUNT)


@dataclass(frozen=True)
class GenerationConfig(ConfigNode):
    """Settings of ``python -m verl.trainer.main_generation``."""

    trainer: GenerationTrainerConfig = section(GenerationTrainerConfig)
    data: GenerationDataConfig = section(GenerationDataConfig)
    model: HFModelConfig = section(HFModelConfig)
    rollout: GenerationRolloutConfig = section(GenerationRolloutConfig)

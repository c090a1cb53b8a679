"""Settings of batch generation (`verl.trainer.main_generation`) and of evaluation (`verl.trainer.main_eval`)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.data import ImageDataConfig
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.tree import AMOUNT, COUNT, PORTION, POSITIVE, TOP_K, ValueBound


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


@dataclass(frozen=True)
class EvaluationDataConfig(ConfigNode):
    """The answers to score, and the columns that describe them."""

    path: str = setting("~/data/math_Qwen2-7B-Instruct.parquet", "file that batch generation wrote", path=True)
    prompt_key: str = setting("prompt", "column with the prompt")
    response_key: str = setting("responses", "column with the answers: a list of texts per row, or one text")
    data_source_key: str = setting("data_source", "column that picks the built-in scorer and groups the results")
    reward_model_key: str = setting("reward_model", "column whose ground_truth the scorer compares with")


@dataclass(frozen=True)
class EvaluationFunctionConfig(ConfigNode):
    """A scorer of your own."""

    path: str | None = setting(None, "Python file with a scorer; null: the built-in scorers", path=True)
    name: str | None = setting(
        None, "name of the scorer; null: compute_score or compute_reward", upstream="compute_score"
    )
    reward_kwargs: dict = setting({}, "extra keyword arguments of the function")


@dataclass(frozen=True)
class EvaluationRewardConfig(ConfigNode):
    """Inputs of the scorer."""

    ground_truth: str = setting(
        "needed",
        "needed: refuse rows without reward_model.ground_truth if the reward function takes it (an "
        "empty text counts as one); none: the dataset has none, pass None",
        upstream=ABSENT,
        choices=("needed", "none"),
    )


@dataclass(frozen=True)
class EvaluationReportConfig(ConfigNode):
    """The report, and its files."""

    right_from: float = setting(
        1.0, "minimum score (or acc, if the scorer returns one) of a correct answer", upstream=ABSENT
    )
    markdown: str | None = setting(None, "file for the report", path=True, upstream=ABSENT)
    json: str | None = setting(None, "file for its numbers", path=True, upstream=ABSENT)
    samples: str | None = setting(None, "parquet file with a row per answer", path=True, upstream=ABSENT)
    compare: str | None = setting(
        None, "answers of another run to the same prompts: differences with intervals", path=True, upstream=ABSENT
    )
    timeout: float = setting(30.0, "time limit per answer, in seconds", upstream=ABSENT, within=POSITIVE)
    num_workers: int = setting(
        8, "maximum number of scoring processes; at most one per core", upstream=ABSENT, within=COUNT
    )
    seed: int = setting(42, "seed of the bootstrap", upstream=ABSENT)


@dataclass(frozen=True)
class EvaluationConfig(ConfigNode):
    """Settings of ``python -m verl.trainer.main_eval``."""

    data: EvaluationDataConfig = section(EvaluationDataConfig)
    custom_reward_function: EvaluationFunctionConfig = section(EvaluationFunctionConfig)
    reward: EvaluationRewardConfig = section(EvaluationRewardConfig)
    report: EvaluationReportConfig = section(EvaluationReportConfig)

"""Settings of evaluation (`python -m verl.trainer.main_eval`)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.bounds import COUNT, POSITIVE
from verl.config.schema.node import ABSENT, ConfigNode, section, setting


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
    """The report, and the files that it goes to."""

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

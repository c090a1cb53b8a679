"""Settings of evaluation (`python -m verl.trainer.main_eval`)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ABSENT, ConfigNode, section, setting


@dataclass(frozen=True)
class EvaluationDataConfig(ConfigNode):
    """Which answers, and the columns that say what they are answers to."""

    path: str = setting("~/data/math_Qwen2-7B-Instruct.parquet", "file that batch generation wrote", path=True)
    prompt_key: str = setting("prompt", "column with the prompt")
    response_key: str = setting("responses", "column with the answers: a list of texts per row, or one text")
    data_source_key: str = setting("data_source", "column that picks the built-in scorer and groups the results")
    reward_model_key: str = setting("reward_model", "column whose ground_truth is what the scorer compares with")


@dataclass(frozen=True)
class EvaluationFunctionConfig(ConfigNode):
    """A scorer of one's own."""

    path: str | None = setting(None, "Python file with the function; null: the built-in scorers", path=True)
    name: str | None = setting(None, "its name; null: compute_score or compute_reward", upstream="compute_score")
    reward_kwargs: dict = setting({}, "further keyword arguments of the function")


@dataclass(frozen=True)
class EvaluationRewardConfig(ConfigNode):
    """What the scorer is given."""

    ground_truth: str = setting(
        "needed",
        "needed: a row without reward_model.ground_truth is refused where the reward function names that parameter (an "
        "empty text is one); none: the dataset has none, and the function gets None",
        upstream=ABSENT,
        choices=("needed", "none"),
    )


@dataclass(frozen=True)
class EvaluationReportConfig(ConfigNode):
    """What is computed, and where it goes besides the screen."""

    right_from: float = setting(
        1.0, "score (or acc, where the scorer gives one) from which an answer is right", upstream=ABSENT
    )
    markdown: str | None = setting(None, "file for the report", path=True, upstream=ABSENT)
    json: str | None = setting(None, "file for its numbers", path=True, upstream=ABSENT)
    samples: str | None = setting(None, "parquet file with a row per answer", path=True, upstream=ABSENT)
    compare: str | None = setting(
        None, "answers of another run to the same prompts: differences with intervals", path=True, upstream=ABSENT
    )
    timeout: float = setting(30.0, "seconds that one answer may take to score", upstream=ABSENT)
    num_workers: int = setting(8, "most processes that score; never more than cores", upstream=ABSENT)
    seed: int = setting(42, "seed of the bootstrap", upstream=ABSENT)


@dataclass(frozen=True)
class EvaluationConfig(ConfigNode):
    """Everything ``python -m verl.trainer.main_eval`` can be told."""

    data: EvaluationDataConfig = section(EvaluationDataConfig)
    custom_reward_function: EvaluationFunctionConfig = section(EvaluationFunctionConfig)
    reward: EvaluationRewardConfig = section(EvaluationRewardConfig)
    report: EvaluationReportConfig = section(EvaluationReportConfig)

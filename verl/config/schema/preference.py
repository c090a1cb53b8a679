"""Settings of training on pairs of answers: direct preference optimisation and reward models."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.bounds import AMOUNT, COUNT, POSITIVE, ValueBound
from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.optim import OptimizerConfig
from verl.config.schema.sft import SFTDataConfig, SFTRunConfig, SFTTrainerConfig

_PAIRS = "a pair is read from data.prompt_key, data.chosen_key and data.rejected_key"
WITHOUT_REFERENCE = ("simpo", "orpo")
"""Values of ``dpo.loss_type`` whose loss has no reference policy."""


@dataclass(frozen=True)
class PreferenceDataConfig(SFTDataConfig):
    """Prompts with a chosen and a rejected answer each."""

    train_batch_size: int = setting(64, "pairs per optimizer step, over all processes", upstream=ABSENT, within=COUNT)
    micro_batch_size_per_gpu: int = setting(
        4,
        "rows per pass of one process, two for each pair, with use_dynamic_bsz=false",
        upstream=ABSENT,
        within=COUNT,
    )
    max_token_len_per_gpu: int | None = setting(
        None,
        "tokens per pass of one process with use_dynamic_bsz; at least a pair; null: 8192, on CPU fewer",
        upstream=ABSENT,
        within=COUNT,
    )
    train_files: str | list = setting(
        "~/data/full_hh_rlhf/rm/train.parquet",
        "parquet, jsonl, json, csv or arrow file, or a folder of save_to_disk; or a list of them (local or hdfs://)",
        upstream=ABSENT,
        path=True,
    )
    prompt_key: str | None = setting("prompt", "column with the prompt: a text or chat messages", upstream=ABSENT)
    chosen_key: str = setting("chosen", "column with the better answer: a text or chat messages", upstream=ABSENT)
    rejected_key: str = setting("rejected", "column with the worse answer", upstream=ABSENT)
    margin_key: str = setting(
        "margin",
        "optional column with the margin of the chosen answer (reward models)",
        upstream=ABSENT,
    )
    messages_key: str = setting("messages", "column with the chat messages", no_effect=_PAIRS)
    response_key: str | None = setting(None, "column with the answer", no_effect=_PAIRS)
    prompt_dict_keys: list | None = setting(None, "path to the question inside its column", no_effect=_PAIRS)
    response_dict_keys: list | None = setting(None, "path to the answer inside its column", no_effect=_PAIRS)


@dataclass(frozen=True)
class DPOConfig(ConfigNode):
    """The loss on pairs, and the policy that it is measured against."""

    beta: float = setting(0.1, "strength of the reference policy", upstream=ABSENT, within=POSITIVE)
    loss_type: str = setting(
        "sigmoid",
        "sigmoid (DPO), ipo, hinge; simpo and orpo read log-probs per token, and no reference policy",
        upstream=ABSENT,
        choices=("sigmoid", "ipo", "hinge", *WITHOUT_REFERENCE),
    )
    simpo_gamma: float = setting(
        0.5,
        "simpo: margin by which the chosen answer's reward is to be larger",
        upstream=ABSENT,
        within=AMOUNT,
    )
    sft_coef: float | None = setting(
        None,
        "weight of the negative log-prob per token of the chosen answer (RPO, CPO); null: 1 for orpo, else 0",
        upstream=ABSENT,
        within=AMOUNT,
    )
    label_smoothing: float = setting(
        0.0,
        "sigmoid: assumed share of mislabelled pairs",
        upstream=ABSENT,
        within=ValueBound("0 or more, below 0.5", lambda share: 0 <= share < 0.5),
    )
    length_normalised: bool = setting(False, "average log-probs over tokens instead of summing them", upstream=ABSENT)
    reference_free: bool = setting(
        False, "drop the reference policy; treat all answers as equally likely", upstream=ABSENT
    )
    ref_model_path: str | None = setting(
        None,
        "model folder of the reference policy; null: model.path (with LoRA: the model without its adapter)",
        upstream=ABSENT,
        path=True,
    )
    precompute_ref_log_probs: bool = setting(
        False,
        "compute reference log-probs once before training, to free the reference's memory",
        upstream=ABSENT,
    )


@dataclass(frozen=True)
class DPOTrainerConfig(SFTTrainerConfig):
    """A run of direct preference optimisation."""

    data: PreferenceDataConfig = section(PreferenceDataConfig)
    dpo: DPOConfig = section(DPOConfig)
    trainer: SFTRunConfig = section(SFTRunConfig, project_name="dpo", total_epochs=1)
    optim: OptimizerConfig = section(OptimizerConfig, lr=5e-7)


@dataclass(frozen=True)
class RewardTrainingConfig(ConfigNode):
    """The loss of a reward model."""

    centering: float = setting(
        0.0,
        "weight of the squared sum of both scores, which centres scores around zero",
        upstream=ABSENT,
        within=AMOUNT,
    )


@dataclass(frozen=True)
class RMTrainerConfig(SFTTrainerConfig):
    """Training of a reward model."""

    data: PreferenceDataConfig = section(PreferenceDataConfig)
    rm: RewardTrainingConfig = section(RewardTrainingConfig)
    trainer: SFTRunConfig = section(SFTRunConfig, project_name="rm", total_epochs=1)
    optim: OptimizerConfig = section(OptimizerConfig, lr=9e-6)

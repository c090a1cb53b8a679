"""Settings of supervised fine-tuning, and of training on pairs of answers."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.algorithm import TOP_K_KINDS, DivergenceConfig
from verl.config.schema.data import ImageDataConfig
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.role import (
    LIKE_ENGINE,
    CheckpointContentsConfig,
    FSDPEngineConfig,
    MegatronEngineConfig,
    OptimizerConfig,
    ProfilerConfig,
    RunConfig,
)
from verl.config.schema.torchtitan import TITAN_LIKE_ENGINE, TorchTitanEngineConfig
from verl.config.schema.tree import (
    AMOUNT,
    COUNT,
    EVERY,
    GPUS,
    PORTION,
    POSITIVE,
    ROWS,
    NameBound,
    ValueBound,
    at_least,
    inherited,
)

_TORCHRUN = "torchrun says how many processes there are, and the run uses all of them; more are refused"


@dataclass(frozen=True)
class SFTCustomClassConfig(ConfigNode):
    """A dataset class of your own instead of the built-in one."""

    path: str | None = setting(
        None, "Python file with a dataset class of your own, instead of the built-in one", path=True
    )
    name: str | None = setting(None, "class name in that file; a torch Dataset")


@dataclass(frozen=True)
class SFTDataConfig(ImageDataConfig):
    """Conversations to learn from: a column of chat messages, or two columns."""

    train_batch_size: int = setting(256, "rows per optimizer step, over all processes", within=COUNT)
    micro_batch_size_per_gpu: int = setting(4, "rows per pass of one process, with use_dynamic_bsz=false", within=COUNT)
    max_token_len_per_gpu: int | None = setting(
        None,
        "tokens per pass of one process with use_dynamic_bsz; at least the longest row; null: 8192, on CPU fewer",
        upstream=8192,
        within=COUNT,
    )
    use_dynamic_bsz: bool = setting(True, "build micro-batches by token count, not by row count")
    train_files: str | list = setting(
        "~/data/gsm8k/train.parquet",
        "parquet, jsonl, json, csv or arrow file, or a folder of save_to_disk; or a list of them (local or hdfs://)",
        path=True,
    )
    val_files: str | list | None = setting(None, "the same for validation; null: no validation", path=True)
    filter_invalid: bool = setting(
        False,
        "skip and count rows that cannot be learned from, instead of stopping at the first",
        upstream=ABSENT,
    )
    train_max_samples: int = setting(-1, "maximum number of rows to use; -1: all", within=ROWS)
    val_max_samples: int = setting(-1, "maximum number of rows to use; -1: all", within=ROWS)
    messages_key: str = setting("messages", "column with the chat messages")
    tools_key: str = setting("tools", "optional column with tool schemas")
    enable_thinking_key: str = setting("enable_thinking", "optional column with the thinking switch of a row")
    enable_thinking_default: bool | None = setting(
        None, "thinking switch of rows without one; null: the template's default"
    )
    pad_mode: str = setting(
        "no_padding",
        "no_padding: pad a batch to its longest row; right: pad every row to max_length",
        choices=("no_padding", "right"),
    )
    max_length: int = setting(1024, "maximum row length in tokens", within=at_least(2))
    truncation: str = setting(
        "error",
        "what to do with an overlong row: error stops the run; left, right, middle truncate there",
        choices=("error", "left", "right", "middle"),
    )
    balance_dp_token: bool = setting(
        False,
        "split rows over processes so that each gets as many tokens",
        no_effect="trainer.balance_batch decides it",
    )
    custom_cls: SFTCustomClassConfig = section(SFTCustomClassConfig)
    use_shm: bool = setting(False, "copy data files to shared memory before reading")
    apply_chat_template_kwargs: dict = setting({}, "arguments of the chat template")
    num_workers: int = setting(0, "processes that load rows; 0: in the main process", upstream=8, within=AMOUNT)
    ignore_input_ids_mismatch: bool = setting(
        False, "accept rows that tokenise differently turn by turn than as a whole"
    )
    prompt_key: str | None = setting(None, "column with the question, in two-column data")
    response_key: str | None = setting(None, "column with the answer, in two-column data")
    prompt_dict_keys: list | None = setting(None, "path to the question inside that column")
    response_dict_keys: list | None = setting(None, "path to the answer inside that column")


@dataclass(frozen=True)
class SFTEngineConfig(FSDPEngineConfig):
    """The training backend, with the settings of the engines that hold a full model per data-parallel group.

    Those of Megatron-Core stand below ``megatron``; upstream writes them without it.
    """

    strategy: str = setting(
        "auto",
        "training backend: plain, fsdp, fsdp2, megatron, veomni, torchtitan, automodel; auto: plain in one process, "
        "fsdp2 in several",
        upstream="fsdp",
    )
    megatron: MegatronEngineConfig = section(MegatronEngineConfig, LIKE_ENGINE)
    torchtitan: TorchTitanEngineConfig = section(TorchTitanEngineConfig, TITAN_LIKE_ENGINE)


EACH_EPOCH = "after_each_epoch"
"""Of save_freq and test_freq: the steps of one pass over the training data."""
EVERY_OR_EPOCH = ValueBound(
    f"{EVERY.allowed}, or {EACH_EPOCH}", lambda value: value == EACH_EPOCH if isinstance(value, str) else value >= -1
)


@dataclass(frozen=True)
class SFTRunConfig(RunConfig):
    """The run: its length, hardware, trackers and checkpoints."""

    project_name: str = inherited(RunConfig, "project_name", "gsm8k-sft")
    experiment_name: str = inherited(RunConfig, "experiment_name", "test")
    total_epochs: int = inherited(RunConfig, "total_epochs", 4)
    best_mode: str = inherited(RunConfig, "best_mode", "min")
    seed: int = setting(1, "seed of the run")
    save_freq: int | str = setting(
        -1, "steps between checkpoints, the last step included; after_each_epoch; -1: never", within=EVERY_OR_EPOCH
    )
    test_freq: int | str = setting(
        -1, "steps between validations, the last step included; after_each_epoch; -1: never", within=EVERY_OR_EPOCH
    )
    val_before_train: bool = setting(False, "validate before the first step", upstream=ABSENT)
    max_ckpt_to_keep: int | None = setting(None, "number of checkpoints to keep; null: all", within=COUNT)
    balance_batch: bool = setting(True, "split rows over processes so that each gets as many tokens")
    nnodes: int = setting(1, "number of machines", no_effect=_TORCHRUN, within=COUNT)
    n_gpus_per_node: int | None = setting(
        None,
        "processes per machine, one per GPU; null: what torchrun started",
        upstream=1,
        no_effect=_TORCHRUN,
        within=GPUS,
    )
    profile_interval: list = setting([-1, -1], "first and last step to profile; -1: none")


FULL_MODES = ("forward_kl", "reverse_kl", "jsd")
"""Divergences over all tokens: the teacher is in the process of the student."""


@dataclass(frozen=True)
class SFTDistillationLossConfig(DivergenceConfig):
    """What the student learns of its teacher on the answers of a file."""

    loss_mode: str = setting(
        "forward_kl",
        "divergence of each trained token: over all tokens, or with _topk over the teacher's topk most likely ones",
        upstream=ABSENT,
        within=NameBound((*FULL_MODES, *TOP_K_KINDS)),
    )
    alpha: float = setting(
        0.5, "weight of the divergence; the cross entropy has 1 - alpha", upstream=ABSENT, within=PORTION
    )
    temperature: float = setting(
        1.0, "the logits of both models are divided by it in the divergence", upstream=ABSENT, within=POSITIVE
    )


@dataclass(frozen=True)
class SFTDistillationConfig(ConfigNode):
    """A frozen teacher of supervised fine-tuning, in the processes of the student."""

    enabled: bool = setting(False, "learn from a teacher on the answers of the file", upstream=ABSENT)
    distillation_loss: SFTDistillationLossConfig = section(SFTDistillationLossConfig, needs="..enabled=true")
    teacher_models: dict = setting({}, "the teacher by its name: {teacher: {model_path: FOLDER}}", upstream=ABSENT)


@dataclass(frozen=True)
class SupervisedConfig(ConfigNode):
    """What the programs of supervised training have in common."""

    data: SFTDataConfig = section(SFTDataConfig)
    checkpoint: CheckpointContentsConfig = section(CheckpointContentsConfig)
    trainer: SFTRunConfig = section(SFTRunConfig)
    model: HFModelConfig = section(HFModelConfig)
    engine: SFTEngineConfig = section(SFTEngineConfig)
    optim: OptimizerConfig = section(OptimizerConfig, lr=1e-3)
    profiler: ProfilerConfig = section(ProfilerConfig, tool="torch")


@dataclass(frozen=True)
class SFTTrainerConfig(SupervisedConfig):
    """A supervised fine-tuning run."""

    distillation: SFTDistillationConfig = section(SFTDistillationConfig, needs=".enabled=true")


_PAIRS = (
    "rows are read from data.prompt_key, with data.chosen_key and data.rejected_key, or for KTO data.completion_key"
)
WITHOUT_REFERENCE = ("simpo", "orpo", "cpo")
"""Values of ``dpo.loss_type`` whose loss has no reference policy."""


@dataclass(frozen=True)
class PreferenceDataConfig(SFTDataConfig):
    """Prompts with a chosen and a rejected answer each, or for KTO with one answer and its label."""

    train_batch_size: int = setting(
        64, "pairs (KTO: answers) per optimizer step, over all processes", upstream=ABSENT, within=COUNT
    )
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
    completion_key: str = setting("completion", "KTO: column with the answer: a text or chat messages", upstream=ABSENT)
    label_key: str = setting("label", "KTO: column that says whether the answer is desirable", upstream=ABSENT)
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
        "sigmoid (DPO), ipo, hinge; without a reference policy: simpo and orpo on log-probs per token, cpo; kto reads "
        "single answers with labels",
        upstream=ABSENT,
        choices=("sigmoid", "ipo", "hinge", *WITHOUT_REFERENCE, "kto"),
    )
    loss_fn: str | None = setting(
        None,
        "your loss instead, my_pkg.my_mod:my_loss or file.py:my_loss; see docs/howto/preference.md",
        upstream=ABSENT,
    )
    desirable_weight: float = setting(
        1.0, "weight of desirable answers", upstream=ABSENT, within=POSITIVE, needs=".loss_type=kto"
    )
    undesirable_weight: float = setting(
        1.0, "weight of undesirable answers", upstream=ABSENT, within=POSITIVE, needs=".loss_type=kto"
    )
    simpo_gamma: float = setting(
        0.5,
        "simpo: margin by which the chosen answer's reward is to be larger",
        upstream=ABSENT,
        within=AMOUNT,
    )
    sft_coef: float | None = setting(
        None,
        "weight of the negative log-prob per token of the chosen answer (RPO, CPO); null: 1 for orpo and cpo, else 0",
        upstream=ABSENT,
        within=AMOUNT,
    )
    label_smoothing: float = setting(
        0.0,
        "sigmoid, cpo: assumed share of mislabelled pairs",
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
class DPOTrainerConfig(SupervisedConfig):
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
class RMTrainerConfig(SupervisedConfig):
    """Training of a reward model."""

    data: PreferenceDataConfig = section(PreferenceDataConfig)
    rm: RewardTrainingConfig = section(RewardTrainingConfig)
    trainer: SFTRunConfig = section(SFTRunConfig, project_name="rm", total_epochs=1)
    optim: OptimizerConfig = section(OptimizerConfig, lr=9e-6)


def teacher_of_files(section: SFTDistillationConfig) -> tuple[str, str]:
    """The key of the setting that names the teacher of supervised fine-tuning, and its folder."""
    ((name, described),) = section.teacher_models.items()
    return f"distillation.teacher_models.{name}.model_path", str(described["model_path"])

"""Settings of the RL datasets."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ABSENT, ConfigNode, section, setting


@dataclass(frozen=True)
class CustomClassConfig(ConfigNode):
    """A dataset class of your own instead of the built-in one."""

    path: str | None = setting(
        None, "Python file with a dataset class of your own, instead of the built-in one", path=True
    )
    name: str | None = setting(None, "name of that class, which is a torch Dataset")


@dataclass(frozen=True)
class DataConfig(ConfigNode):
    """Prompts for RL training and validation."""

    tokenizer: str | None = setting(None, "folder or hub name of the tokenizer; null: that of the model", path=True)
    use_shm: bool = setting(False, "copy data files to shared memory before they are read")
    train_files: str | list = setting(
        "~/data/rlhf/gsm8k/train.parquet",
        "parquet, jsonl, json, csv or arrow file with prompts, or a folder of save_to_disk; or a list (local or hdfs://)",
        path=True,
    )
    val_files: str | list | None = setting(
        None, "the same for validation; null: no validation", upstream="~/data/rlhf/gsm8k/test.parquet", path=True
    )
    train_max_samples: int = setting(-1, "use at most that many rows; -1: all")
    val_max_samples: int = setting(-1, "use at most that many rows; -1: all")
    prompt_key: str = setting("prompt", "column with the prompt: a list of chat messages, or a text")
    reward_fn_key: str = setting("data_source", "column that says which scorer a row gets")
    max_prompt_length: int = setting(
        512, "longest prompt in tokens, template included; longer ones are treated as truncation says"
    )
    max_response_length: int = setting(512, "most tokens that are sampled per response")
    train_batch_size: int = setting(1024, "prompts per step; each gets rollout.n samples")
    gen_batch_size: int | None = setting(
        None, "prompts sampled at a time until a training batch is full; null: train_batch_size"
    )
    oversample_factor: float = setting(
        1.0,
        "prompts sampled per step, in training batches: those that the filters below like are trained on first, then "
        "the earliest of the others, and the rest is dropped",
        upstream=ABSENT,
    )
    filter_accuracy: bool = setting(
        False,
        "oversample_factor: like prompts whose samples are right at a rate within the two bounds",
        upstream=ABSENT,
    )
    accuracy_lower_bound: float = setting(
        0.2, "lowest rate of right samples that filter_accuracy likes", upstream=ABSENT
    )
    accuracy_upper_bound: float = setting(
        0.8, "highest rate of right samples that filter_accuracy likes", upstream=ABSENT
    )
    filter_truncate: bool = setting(
        False, "oversample_factor: like prompts of which no sample was cut off by the length limit", upstream=ABSENT
    )
    val_batch_size: int | None = setting(None, "prompts sampled at a time in validation; null: all")
    tool_config_path: str | None = setting(
        None,
        "YAML file of tools, whose schemas count as part of a prompt",
        follows="actor_rollout_ref.rollout.multi_turn.tool_config_path",
        path=True,
    )
    function_tool_path: str | None = setting(
        None,
        "Python file of function tools, whose schemas count as part of a prompt",
        follows="actor_rollout_ref.rollout.multi_turn.function_tool_path",
        path=True,
    )
    return_raw_input_ids: bool = setting(
        False, "add the prompt without template as token ids (raw_input_ids) to each row"
    )
    return_raw_chat: bool = setting(True, "keep the messages (raw_prompt) in each row")
    return_full_prompt: bool = setting(False, "add the prompt with template as text (full_prompts) to each row")
    shuffle: bool = setting(True, "shuffle training rows, anew in every epoch")
    seed: int | None = setting(None, "seed of that shuffling; null: trainer.seed")
    dataloader_num_workers: int = setting(
        0, "processes that load rows; 0: in the main process, at most one per core", upstream=8
    )
    validation_shuffle: bool = setting(False, "shuffle validation rows")
    filter_overlong_prompts: bool = setting(
        False, "drop prompts that are longer than max_prompt_length before training"
    )
    filter_overlong_prompts_workers: int = setting(1, "processes that measure prompts")
    truncation: str = setting(
        "error",
        "what happens to a prompt that is too long: error stops the run, left, right and middle cut there",
        choices=("error", "left", "right", "middle"),
    )
    trust_remote_code: bool = setting(False, "run Python code that comes with the tokenizer")
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    apply_chat_template_kwargs: dict = setting({}, "arguments of the chat template, e.g. {enable_thinking: false}")
    cache_dir: str = setting("~/.cache/verl/rlhf", "folder for local copies of remote files", path=True)
    need_tools_kwargs: bool = setting(
        False, "rows carry arguments for tools (extra_info.tools_kwargs); one without them is told"
    )

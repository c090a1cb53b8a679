"""Settings of the RL datasets."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.node import ConfigNode, section, setting


@dataclass(frozen=True)
class CustomClassConfig(ConfigNode):
    """``data.custom_cls``."""

    path: str | None = setting(None, "custom Dataset file", path=True)
    name: str | None = setting(None, "class name")


@dataclass(frozen=True)
class DataConfig(ConfigNode):
    """Prompts for RL training and validation."""

    tokenizer: str | None = setting(None, "tokenizer override", path=True)
    use_shm: bool = setting(False, "stage data in shared memory")
    train_files: str | list = setting(
        "~/data/rlhf/gsm8k/train.parquet", "parquet/json/jsonl path or list (local or HDFS)", path=True
    )
    val_files: str | list | None = setting(
        None, "same for validation", upstream="~/data/rlhf/gsm8k/test.parquet", path=True
    )
    train_max_samples: int = setting(-1, "cap (-1 all)")
    val_max_samples: int = setting(-1, "cap (-1 all)")
    prompt_key: str = setting("prompt", "column with chat messages")
    reward_fn_key: str = setting("data_source", "column that selects the scorer")
    max_prompt_length: int = setting(512, "left-pad length / filter limit")
    max_response_length: int = setting(512, "generation limit")
    train_batch_size: int = setting(1024, "prompts per step (times rollout.n samples)")
    gen_batch_size: int | None = setting(None, "prompts fetched per dataloader call")
    val_batch_size: int | None = setting(None, "deprecated")
    tool_config_path: str | None = setting(
        None,
        "follows rollout.multi_turn (for length filtering)",
        follows="actor_rollout_ref.rollout.multi_turn.tool_config_path",
        planned="multi-turn rollouts and tools",
        path=True,
    )
    function_tool_path: str | None = setting(
        None,
        "follows rollout.multi_turn",
        follows="actor_rollout_ref.rollout.multi_turn.function_tool_path",
        planned="multi-turn rollouts and tools",
        path=True,
    )
    return_raw_input_ids: bool = setting(False, "keep untemplated ids")
    return_raw_chat: bool = setting(True, "keep messages")
    return_full_prompt: bool = setting(False, "keep rendered prompt")
    shuffle: bool = setting(True, "shuffle train")
    seed: int | None = setting(None, "shuffle seed")
    dataloader_num_workers: int = setting(0, "loader workers", upstream=8)
    image_patch_size: int = setting(14, "vision patch", planned="vision-language models")
    validation_shuffle: bool = setting(False, "shuffle validation")
    filter_overlong_prompts: bool = setting(False, "drop long prompts")
    filter_overlong_prompts_workers: int = setting(1, "filter processes")
    truncation: str = setting("error", "error, left, right, middle", choices=("error", "left", "right", "middle"))
    image_key: str = setting("images", "image column", planned="vision-language models")
    video_key: str = setting("videos", "video column", planned="vision-language models")
    audio_key: str = setting("audios", "audio column", planned="vision-language models")
    trust_remote_code: bool = setting(False, "for tokenizer code")
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    return_multi_modal_inputs: bool = setting(True, "keep processor tensors", planned="vision-language models")
    apply_chat_template_kwargs: dict = setting({}, "template args (e.g. enable_thinking)")
    mm_processor_kwargs: dict = setting({}, "processor args", planned="vision-language models")
    cache_dir: str = setting("~/.cache/verl/rlhf", "folder for copies of remote files", path=True)
    filter_prompts: str | None = setting(None, "function that drops rows", planned="prompt filters by function")
    need_tools_kwargs: bool = setting(False, "rows carry arguments for tools", planned="multi-turn rollouts and tools")
    chat_template_func: str | None = setting(
        None, "function that renders prompts", planned="prompt filters by function"
    )

"""Settings of datasets: rows with or without images, and the prompts of RL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.tree import AMOUNT, COUNT, ROWS, at_most


@dataclass(frozen=True)
class ImageDataConfig(ConfigNode):
    """How the images and videos of rows are read."""

    image_key: str = setting("images", "column with a row's images, in the order of <image> in its messages")
    video_key: str = setting("videos", "column with a row's videos, in the order of <video> in its messages")
    mm_processor_kwargs: dict = setting(
        {},
        "arguments of the image processor, for images and videos that name none; min_pixels and max_pixels, fps, "
        "min_frames and max_frames",
    )
    max_image_pixels: int = setting(
        50_000_000,
        "an image with more pixels is refused before it is decoded, and a video of which more would be shown",
        upstream=ABSENT,
    )
    max_video_frames: int = setting(768, "a video of which more frames would be shown is refused", upstream=ABSENT)
    allow_remote_images: bool = setting(
        False, "fetch images and videos that rows name by http:// or https://", upstream=ABSENT
    )


@dataclass(frozen=True)
class CustomClassConfig(ConfigNode):
    """A dataset class of your own instead of the built-in one."""

    path: str | None = setting(
        None, "Python file with a dataset class of your own, instead of the built-in one", path=True
    )
    name: str | None = setting(None, "class name in that file; a torch Dataset")


@dataclass(frozen=True)
class SamplerClassConfig(ConfigNode):
    """An order of the training prompts of your own, such as a curriculum."""

    class_path: str | None = setting(
        None, "Python file with the order of the training prompts, instead of data.shuffle", upstream=ABSENT, path=True
    )
    class_name: str | None = setting(
        None, "class name in that file; a torch Sampler, called with data_source and data_config", upstream=ABSENT
    )


@dataclass(frozen=True)
class PromptFilterConfig(ConfigNode):
    """A function of your own that drops prompts."""

    path: str | None = setting(
        None,
        "Python file with a function that gets a row as a dict of its columns and returns whether its prompt is used; "
        "for training and validation",
        upstream=ABSENT,
        path=True,
    )
    name: str = setting("keep_prompt", "function name in that file", upstream=ABSENT, needs=".path")


@dataclass(frozen=True)
class DataConfig(ImageDataConfig):
    """Prompts for RL training and validation."""

    tokenizer: str | None = setting(None, "tokenizer, as a folder or hub name; null: the model's", path=True)
    use_shm: bool = setting(False, "copy data files to shared memory before reading")
    train_files: str | list = setting(
        "~/data/rlhf/gsm8k/train.parquet",
        "parquet, jsonl, json, csv or arrow file with prompts, or a folder of save_to_disk; or a list (local or hdfs://)",
        path=True,
    )
    val_files: str | list | None = setting(
        None, "the same for validation; null: no validation", upstream="~/data/rlhf/gsm8k/test.parquet", path=True
    )
    train_max_samples: int = setting(-1, "maximum number of rows to use; -1: all", within=ROWS)
    val_max_samples: int = setting(-1, "maximum number of rows to use; -1: all", within=ROWS)
    prompt_key: str = setting("prompt", "column with the prompt: a list of chat messages, or a text")
    reward_fn_key: str = setting("data_source", "column that selects the scorer of a row")
    max_prompt_length: int = setting(
        512,
        "maximum prompt length in tokens, chat template included; truncation decides what happens to longer ones",
        within=COUNT,
    )
    max_response_length: int = setting(512, "maximum response length in tokens", within=COUNT)
    min_response_length: int = setting(
        0, "minimum response length in tokens: before it every token that ends a response has probability 0"
    )
    train_batch_size: int = setting(1024, "prompts per step; each gets rollout.n samples", within=COUNT)
    gen_batch_size: int | None = setting(
        None,
        "prompts sampled at a time until a training batch is full; null: train_batch_size",
        within=COUNT,
    )
    oversample_factor: float = setting(
        1.0,
        "prompts to sample per step, in training batches; those that pass the filters below are trained on first, then "
        "the earliest others; the rest is dropped",
        upstream=ABSENT,
        within=COUNT,
    )
    filter_accuracy: bool = setting(
        False,
        "oversample_factor: prefer prompts whose accuracy lies within the two bounds",
        upstream=ABSENT,
    )
    accuracy_lower_bound: float = setting(
        0.2, "filter_accuracy: lowest accuracy to prefer", upstream=ABSENT, needs=".filter_accuracy=true"
    )
    accuracy_upper_bound: float = setting(
        0.8,
        "filter_accuracy: highest accuracy to prefer",
        upstream=ABSENT,
        within=at_most(1),
        needs=".filter_accuracy=true",
    )
    filter_truncate: bool = setting(
        False, "oversample_factor: prefer prompts with no sample cut off by the length limit", upstream=ABSENT
    )
    val_batch_size: int | None = setting(None, "prompts sampled at a time in validation; null: all", within=COUNT)
    tool_config_path: str | None = setting(
        None,
        "YAML file of tools; their schemas are part of the prompt",
        follows="actor_rollout_ref.rollout.multi_turn.tool_config_path",
        path=True,
    )
    function_tool_path: str | None = setting(
        None,
        "Python file of function tools; their schemas are part of the prompt",
        follows="actor_rollout_ref.rollout.multi_turn.function_tool_path",
        path=True,
    )
    return_raw_input_ids: bool = setting(
        False, "add raw_input_ids to each row: token ids of the prompt without the chat template"
    )
    return_raw_chat: bool = setting(True, "keep the messages (raw_prompt) in each row")
    return_full_prompt: bool = setting(
        False, "add full_prompts to each row: the prompt as text, with the chat template"
    )
    shuffle: bool = setting(True, "reshuffle training rows in every epoch")
    seed: int | None = setting(None, "seed of the shuffling; null: trainer.seed")
    dataloader_num_workers: int = setting(
        0,
        "processes that load rows; 0: in the main process, at most one per core",
        upstream=8,
        within=AMOUNT,
    )
    validation_shuffle: bool = setting(False, "shuffle validation rows")
    filter_overlong_prompts: bool = setting(
        False, "drop prompts that are longer than max_prompt_length before training"
    )
    filter_overlong_prompts_workers: int = setting(
        1, "processes that count prompt tokens and run filter_function", within=COUNT
    )
    filter_function: PromptFilterConfig = section(PromptFilterConfig)
    return_multi_modal_inputs: bool = setting(
        True, "keep what the image processor makes of a row (multi_modal_inputs), which the engines need"
    )
    truncation: str = setting(
        "error",
        "what to do with an overlong prompt: error stops the run; left, right, middle truncate there",
        choices=("error", "left", "right", "middle"),
    )
    trust_remote_code: bool = setting(False, "run Python code that comes with the tokenizer")
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    sampler: SamplerClassConfig = section(SamplerClassConfig)
    source_weights: dict = setting(
        {},
        "shares of the training prompts by source, of sum 1: {openai/gsm8k: 0.7, lighteval/MATH: 0.3}; a source is a value "
        "of reward_fn_key's column or, where all keys are such, a file of train_files; empty: every row once per epoch",
        upstream=ABSENT,
    )
    apply_chat_template_kwargs: dict = setting({}, "arguments of the chat template, e.g. {enable_thinking: false}")
    cache_dir: str = setting("~/.cache/verl/rlhf", "folder for local copies of remote files", path=True)
    need_tools_kwargs: bool = setting(
        False, "expect tool arguments in every row (extra_info.tools_kwargs); report rows without them"
    )


SUM_OF_WEIGHTS = 0.005
"""How far the weights of sources may be from a sum of 1, for numbers such as 0.333."""


def fault_of_weights(weights: Mapping[str, object]) -> str:
    """What is wrong with ``data.source_weights``; empty: nothing."""
    for name, weight in weights.items():
        if not _is_weight(weight):
            return f"the weight of {name!r} is {weight!r}, not a number from 0 to 1"
    total = math.fsum(filter(_is_weight, weights.values()))
    return f"the weights sum to {total:g}, not to 1" if abs(total - 1) > SUM_OF_WEIGHTS else ""


def fix_of_weights(weights: Mapping[str, object]) -> str:
    """The same ratio with a sum of 1, where there is one."""
    numbers = {name: weight for name, weight in weights.items() if _is_weight(weight)}
    total = math.fsum(numbers.values())
    if len(numbers) < len(weights) or not total:
        return "Give every source its share of the prompts."
    scaled = ", ".join(f"{name}: {weight / total:.4g}" for name, weight in numbers.items())
    return f"For this ratio set data.source_weights={{{scaled}}}."


def _is_weight(weight: object) -> TypeGuard[float]:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < math.inf

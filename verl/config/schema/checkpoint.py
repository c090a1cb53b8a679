"""What a checkpoint holds: the settings that actor, critic and the supervised trainers share."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.node import ConfigNode, setting

CONTENTS = ("model", "optimizer", "extra", "hf_model")
COPY_CHECK = (
    "steps between bitwise comparisons of weights and optimizer states that several ranks hold alike (data-parallel "
    "replicas, norms under tensor parallelism); every checkpoint compares them, too; -1: only then"
)


@dataclass(frozen=True)
class CheckpointContentsConfig(ConfigNode):
    """What a checkpoint holds."""

    save_contents: list = setting(
        ["model", "optimizer", "extra"],
        "contents to save: model, optimizer, extra (random states and schedules), hf_model (a Hugging Face folder)",
        choices=CONTENTS,
    )
    load_contents: list | None = setting(
        None,
        "contents to load on resume; null: save_contents",
        follows=".save_contents",
        choices=CONTENTS,
    )


@dataclass(frozen=True)
class CriticCheckpointConfig(CheckpointContentsConfig):
    """What a checkpoint of the critic holds."""

    async_save: bool = setting(False, "save in the background: copy the state, then write it while training continues")


@dataclass(frozen=True)
class CheckpointConfig(CriticCheckpointConfig):
    """What a checkpoint of the actor holds."""

    strict: bool = setting(
        True, "stop on a weight that cannot be exported", no_effect="weights are always exported strictly"
    )
    save_lora_only: bool = setting(
        False,
        "write only the adapters of a LoRA model",
        no_effect="a checkpoint of a LoRA model always holds the adapter alone; its base stays where model.path says",
    )
    mbridge_config: dict = setting(
        {},
        "arguments of Megatron-Bridge when it writes weights",
        no_effect="weights are written by the tables of verl/models/megatron.py",
    )

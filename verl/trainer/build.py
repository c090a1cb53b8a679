"""From the configuration to the pieces of a run: the one place that picks backends, devices and classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from verl import device
from verl.config import PPOTrainerConfig, replace
from verl.config.rules.queues import samples_while_training
from verl.config.schema.root import uses_critic, uses_reference, uses_reward_model
from verl.data import RLHFDataset, create_rl_dataset
from verl.data.sample_texts import turns_of_rows
from verl.metrics import notice
from verl.models.flops import device_peak_flops
from verl.observability import samples as sample_output
from verl.observability.tracker import Sample
from verl.observability.tracking import Tracking
from verl.protocol.tokenizer import Tokenizer
from verl.rewards import check_reward_data
from verl.single_controller.base import Role
from verl.trainer.models import RM, model_roles
from verl.trainer.ppo.validation import ValidationSamples
from verl.workers.part import WorkerContext
from verl.workers.scoring import reward_manager as reward_manager

if TYPE_CHECKING:
    from datasets import Dataset as HFDataset

    from verl.data.vision.processor import VisionProcessor


@dataclass(frozen=True)
class AdvantageSettings:
    """The part of ``algorithm`` that upstream's `compute_advantage` takes as single arguments."""

    gamma: float
    lam: float
    norm_adv_by_std_in_grpo: bool
    config: Any

    @property
    def singleton(self) -> str:
        return "zero" if self.config is None else self.config.singleton


def need_reference_policy(config: PPOTrainerConfig) -> bool:
    """A KL term in the loss or in the reward needs the reference policy."""
    return uses_reference(config)


def need_critic(config: PPOTrainerConfig) -> bool:
    """``critic.enable`` where it is set, else: gae has a critic."""
    return uses_critic(config)


def need_reward_model(config: PPOTrainerConfig) -> bool:
    """A reward model with a scalar head scores the samples."""
    return uses_reward_model(config)


def worker_arguments(config: PPOTrainerConfig, role: Role | str, total_steps: int, device_name: str) -> dict[str, Any]:
    """Constructor arguments of the worker that plays ``role``."""
    named, roles, policy = str(role), model_roles(config), config.actor_rollout_ref
    context = WorkerContext(device_name, config.trainer.seed, total_steps, policy.nccl_timeout)
    if named == RM:
        settings = config.reward.reward_model
        read = policy.model
        if settings.input_tokenizer is not None:
            read = replace(read, tokenizer_path=settings.input_tokenizer, custom_chat_template=None)
        return {"role": roles[named], "context": context, "policy": read, "max_length": settings.max_length}
    if named in roles:
        return {"role": roles[named], "context": context}
    if samples_while_training(config):  # the batch calls of validation would free caches that groups in flight use
        policy = replace(policy, rollout=replace(policy.rollout, free_cache_engine=False))
    arguments = {"config": policy, "context": context, "data": config.data}
    if config.trainer.v1.trainer_mode == "sync":
        arguments["shares"] = True
    return {**arguments, "scoring": config} if scores_while_sampling(config) else arguments


def scores_while_sampling(config: PPOTrainerConfig) -> bool:
    """Whether sampling workers also score: not if a reward function needs a reward model's scores."""
    if config.reward.while_sampling and uses_reward_model(config):
        why = "has no effect: the reward model scores whole batches, and the reward function reads its scores"
        notice("reward.while_sampling", why)
        return False
    return config.reward.while_sampling


def dataset(
    config: PPOTrainerConfig, tokenizer: Tokenizer, processor: VisionProcessor | None, is_train: bool
) -> Dataset | None:
    """The training or validation dataset; None where there are no validation files."""
    data = config.data
    files = data.train_files if is_train else data.val_files
    if not files and not is_train:
        return None
    limit = data.train_max_samples if is_train else data.val_max_samples
    return create_rl_dataset(files, data, tokenizer, processor, is_train=is_train, max_samples=limit)


def check_rewards(config: PPOTrainerConfig, dataset: Dataset | None) -> None:
    """Check that the rows can be scored, before anything is allocated.

    A custom dataset is checked as it is used, as are the rows of a loop that may compute its own scores.
    """
    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    if isinstance(dataset, RLHFDataset) and loop in ("single_turn_agent", "tool_agent"):
        key = config.data.reward_fn_key
        columns = dataset.dataframe.column_names
        sources = list(dataset.dataframe[key]) if key in columns else None
        holders = one_by_one(dataset.dataframe, "reward_model") if "reward_model" in columns else [None] * len(dataset)
        # a user's dataset may fill that column when a row is read; a row's own loop may compute its score
        makes_own = type(dataset) is not RLHFDataset or "agent_name" in columns
        check_reward_data(config, sources, () if makes_own else holders, dataset.describe)


def one_by_one(table: HFDataset, column: str, at_once: int = 1000) -> Iterator[Any]:
    """The cells of a column, read in parts: tests of programs are megabytes."""
    alone = table.select_columns([column])
    for start in range(0, len(alone), at_once):
        yield from alone[start : start + at_once][column]


def report_validation(
    config: PPOTrainerConfig, tracking: Tracking | None, seen: ValidationSamples, step: int, folder: Path | None
) -> None:
    """Write validation samples to ``folder`` (``trainer.validation_data_dir``) and a few of them to the trackers."""
    trainer = config.trainer
    if folder is not None:
        sample_output.dump_generations(
            folder, step, inputs=seen.inputs, outputs=seen.outputs, gts=seen.ground_truths,
            scores=seen.scores, reward_extra_infos={**seen.infos, **seen.conversations},
            key="trainer.validation_data_dir",
        )  # fmt: skip
    if trainer.log_val_generations > 0 and tracking is not None:
        turns = turns_of_rows(seen.conversations, len(seen.scores))
        seen_rows = zip(seen.inputs, seen.outputs, seen.scores, repeat(None), seen.questions, turns, seen.pictures)
        rows = [Sample(*row) for row in islice(seen_rows, trainer.log_val_generations)]
        sample_output.ValidationGenerationsLogger().log(tracking, rows, step)


def speed_of_training(
    metrics: dict[str, float], seconds: dict[str, float], num_ranks: int, config: PPOTrainerConfig
) -> dict[str, float]:
    """The metrics with operation counts turned into ``perf/tflops/<role>`` per rank, and ``perf/mfu/<role>``.

    The second is the share of the device's bf16 peak; it is left out where that peak is not known (a CPU).
    """
    rates = {name: value for name, value in metrics.items() if not name.endswith("/tflop")}
    peak = device_peak_flops(device.device_name(device.resolve_device(config.trainer.device)))
    for role in ("actor", "critic"):
        spent = seconds.get(f"update_{role}", 0.0)
        if f"{role}/tflop" in metrics and spent > 0:
            rates[f"perf/tflops/{role}"] = metrics[f"{role}/tflop"] / spent / num_ranks
            if peak:
                rates[f"perf/mfu/{role}"] = rates[f"perf/tflops/{role}"] * 1e12 / peak
    return rates


def memory_metrics(config: PPOTrainerConfig) -> dict[str, float]:
    """Memory of this process under upstream's names."""
    return device.memory_metrics(device.resolve_device(config.trainer.device))

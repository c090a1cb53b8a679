"""`RayPPOTrainer`: the controller of PPO and its successors, over local or Ray worker groups.

The algorithm is in `step.py`, what happens around it in `callbacks.py`; this class owns the pieces and their order.
Subclass it to change a part: each is an attribute, created in its own method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from verl import device
from verl.algorithms.advantages import AdvantageEstimator
from verl.checkpoint import check_metric
from verl.checkpoint.find import find_latest_ckpt_path
from verl.config import PPOTrainerConfig, replace, to_dict
from verl.config.loading.configuration import config_from
from verl.config.machine import pools, topology
from verl.config.schema.root import key_of_prompts_at_once, prompts_at_once
from verl.data import StatefulLoader, create_rl_sampler
from verl.data import collate_fn as default_collate
from verl.data.loader import LearnsFromSteps, PromptSource, SeededSampler
from verl.data.mixture import Mixture
from verl.data.progress import timed
from verl.data.sample_texts import SampleTexts, conversation_columns, ends_of
from verl.errors import DataError, RolloutError, VerlError
from verl.journal.ending import recorded_end
from verl.journal.places import folder_of_run
from verl.metrics import notice
from verl.observability.tracker import Sample
from verl.observability.tracking import Tracking
from verl.outcomes import on_error
from verl.protocol import DataProto, traffic
from verl.registry import ADVANTAGE_ESTIMATORS, refuse_while_loading
from verl.rollout.lost import EngineLostError
from verl.single_controller.base import ClassWithInitArgs, ResourcePoolManager, Role, WorkerGroup, by_rank
from verl.single_controller.local import LocalWorkerGroup, create_colocated_worker_cls
from verl.trainer import build, placement, runtime, sampling
from verl.trainer.keeper import ReplicaKeeper, processes_of_run, waits_for_replica
from verl.trainer.models import model_roles, served_models
from verl.trainer.ppo import accounting, correction, group_filter, judging, record, stages
from verl.trainer.ppo.callbacks import CountSources, TellSaved, UpdateCurriculum, default_callbacks
from verl.trainer.ppo.checkpointing import RunCheckpoints
from verl.trainer.ppo.context import RunState
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_variance_proxy_metrics,
)
from verl.trainer.ppo.sample_rows import shared
from verl.trainer.ppo.schedules import ScheduleRun
from verl.trainer.ppo.trajectories import check_branches
from verl.trainer.ppo.validation import ValidationSamples, Validator
from verl.trainer.signals import StepDropped, StopSignals
from verl.trainer.watchdog import Watchdog
from verl.workers.model import ModelWorker
from verl.workers.replica import ReplicaWorker
from verl.workers.roles import RoleHandle, Roles
from verl.workers.served_teachers import ServedTeachers

__all__ = [
    "AdvantageEstimator",
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
    "find_latest_ckpt_path",
]


class RayPPOTrainer:
    """Builds data, workers and rewards from the configuration and runs the loop.

    Args:
        config: the typed configuration, or a mapping of OmegaConf that says it.
        tokenizer, processor: of the policy.
        role_worker_mapping: `Role` -> worker class, or what ``ray.remote`` made of it.
        resource_pool_manager: which pool each role lives in.
        ray_worker_group_cls: `LocalWorkerGroup` (this process) or a Ray worker group.
        train_dataset, val_dataset, collate_fn, train_sampler: replace what the configuration would build.
        device_name: device of the workers; None takes the configuration's.
    """

    def __init__(
        self,
        config: PPOTrainerConfig | Mapping[str, Any],
        tokenizer: Any,
        role_worker_mapping: Mapping[Role | str, Any],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: Any = LocalWorkerGroup,
        processor: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ):
        refuse_while_loading()
        typed = config if isinstance(config, PPOTrainerConfig) else config_from("ppo_trainer", config)
        self.config = typed = cast(PPOTrainerConfig, typed)
        check_branches(typed, sees=processor is not None)
        self.tokenizer, self.processor = tokenizer, processor
        self.texts = SampleTexts(tokenizer, processor)
        self.role_worker_mapping = placement.plain_classes(role_worker_mapping)
        self.resource_pool_manager = resource_pool_manager
        self.worker_group_cls, self.device_name = ray_worker_group_cls, device_name
        self.callbacks = default_callbacks(typed)
        # Not in the list: a program that replaces the callbacks keeps its journal.
        self._first, self._last = record.KeepJournal(typed), TellSaved(typed)
        self.tracking: Tracking | None = None
        self.replicas: ReplicaKeeper | None = None
        self.teachers: ServedTeachers | None = None
        self._folders: dict[str, Path] = {}
        self._create_dataloader(train_dataset, val_dataset, collate_fn or default_collate, train_sampler)
        self._make_rewards()

    # ---- building ----------------------------------------------------------------------------------------------

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate: Any, sampler: Any) -> None:
        data, trainer = self.config.data, self.config.trainer
        if train_dataset is None:
            train_dataset = build.dataset(self.config, self.tokenizer, self.processor, is_train=True)
        if val_dataset is None:
            val_dataset = build.dataset(self.config, self.tokenizer, self.processor, is_train=False)
        for rows in (train_dataset, val_dataset):
            build.check_rewards(self.config, rows)
        if sampler is None:
            seeded = data if data.seed is not None else replace(data, seed=trainer.seed)
            sampler = create_rl_sampler(seeded, train_dataset)
        if isinstance(sampler, SeededSampler):
            sampler.check_samples(self.config.actor_rollout_ref.rollout.n)
        if isinstance(sampler, LearnsFromSteps):
            self.callbacks.insert(0, UpdateCurriculum(sampler))
        mixture = getattr(sampler, "mixture", None)
        if data.source_weights and isinstance(mixture, Mixture):
            self.callbacks.insert(0, CountSources(mixture))
        loader = StatefulLoader(
            train_dataset,
            batch_size=prompts_at_once(data),
            num_workers=data.dataloader_num_workers,
            drop_last=True,
            collate_fn=collate,
            sampler=sampler,
            key=key_of_prompts_at_once(self.config),
        )
        self.source = PromptSource(loader)
        schedule = topology.schedule_of(self.config)
        self.steps_per_epoch = schedule.steps_of(self.config, len(loader))
        self.total_training_steps = schedule.length_of(self.config, self.steps_per_epoch)
        self.val_loader = None
        if val_dataset is not None:
            self.val_loader = StatefulLoader(
                val_dataset,
                batch_size=data.val_batch_size or len(val_dataset),
                shuffle=data.validation_shuffle,
                seed=trainer.seed,
                num_workers=data.dataloader_num_workers,
                drop_last=False,
                collate_fn=collate,
            )

    def _make_rewards(self) -> None:
        self.judges = judging.judges_of(self.config)
        self._scoring = judging.with_address(self.config, self.judges)
        self.reward_fn: judging.Reward = build.reward_manager(self._scoring, self.tokenizer, num_examine=0)
        self.val_reward_fn: judging.Reward = build.reward_manager(self._scoring, self.tokenizer, num_examine=0)
        if self.judges is not None:
            self.reward_fn = judging.JudgedReward(self.reward_fn, self.judges)
            self.val_reward_fn = judging.JudgedReward(self.val_reward_fn, self.judges)

    def init_workers(self) -> None:
        """Create the worker groups, one colocated process set per pool, and load the models."""
        on = self.device_name or device.resolve_device(self.config.trainer.device)
        self.resource_pool_manager.create_resource_pool()
        with on_error(lambda _: self._close_servers()):
            if self.judges is not None:
                with timed("starting the judge"):
                    judging.start_judges(self.judges, self.config, on)
            self._init_workers(on)

    def _close_servers(self) -> None:
        """Those of judges and of teachers."""
        with contextlib.ExitStack() as closing:  # each of them, also where the other's end fails
            for servers in (self.teachers, self.judges):
                if servers is not None:
                    closing.callback(servers.close)

    def _init_workers(self, on: str) -> None:
        self.roles = Roles()
        by_pool: dict[Any, dict[str, ClassWithInitArgs]] = {}
        for role, named_class in self.role_worker_mapping.items():
            pool = self.resource_pool_manager.get_resource_pool(role)
            for name, worker_class in placement.parts_of(role, named_class).items():
                arguments = build.worker_arguments(self._scoring, name, self.total_training_steps, on)
                by_pool.setdefault(pool, {})[name] = ClassWithInitArgs(worker_class, **arguments)
        make_group = self.worker_group_cls
        if isinstance(make_group, type):
            make_group = cast(Any, make_group).on_device(on, self.config.transfer_queue.enable)
        groups: dict[str, WorkerGroup] = {}
        places: list[str] = []
        for pool, classes in by_pool.items():
            together = create_colocated_worker_cls(classes, placement.random_streams(classes))
            # The service is a process anywhere; the pool is for replicas, which are replaced.
            is_elastic = "rollout" in classes and pools.is_elastic(self.config)
            group = make_group(None if is_elastic else pool, together, seed=self.config.trainer.seed)
            places.append(group.placement())
            groups |= group.spawn(list(classes))
        if self.config.trainer.nnodes > 1:
            notice("trainer.nnodes", "\n".join(["the workers are placed", *places]))
        self._name_roles(groups)
        for name in sorted(groups, key=lambda name: name != "actor"):  # its model is there before what reads it
            with timed(f"loading {name}"):
                by_rank(groups[name], ModelWorker.init_model)()
        self.replicas = self._keeper(groups, on)
        with timed("starting the sampler"):
            sampling.connect(self.config, groups, on, self.replicas)
        served = served_models(self.config)
        if served:
            with timed("starting the teachers"):
                self.teachers = ServedTeachers(self.config, served, on)

    def _keeper(self, groups: Mapping[str, WorkerGroup], on: str) -> ReplicaKeeper | None:
        """Of replicas that are replaced (``rollout.max_replacements``)."""
        if "rollout" not in groups or not pools.is_elastic(self.config):
            return None
        arguments = build.worker_arguments(self.config, "rollout", self.total_training_steps, on)
        replica = ClassWithInitArgs(ReplicaWorker, arguments["config"], arguments["context"])
        pool = self.resource_pool_manager.get_resource_pool(Role.Rollout)
        return ReplicaKeeper(self.config, replica, groups, pool, on)

    def _name_roles(self, groups: dict[str, WorkerGroup]) -> None:
        models = model_roles(self.config)
        samples = "actor" if placement.samples_itself(self.role_worker_mapping) else "rollout"
        self.roles.add(RoleHandle.of(models["actor"], groups["actor"]))
        self.roles.add(RoleHandle("rollout", "sampler", groups[samples]))
        for name, role in models.items():
            if name != "actor" and name in groups:
                self.roles.add(RoleHandle.of(role, groups[name]))

    # ---- running -----------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the end: resume if configured, validate, step, log; callbacks run in their order."""
        with on_error(lambda _: self._close_servers()):
            stop = self._begin()
        folder, limit = Path(self.config.trainer.default_local_dir), self.config.trainer.hang_seconds
        looks, mends = partial(processes_of_run, self.roles, self.replicas), self._is_mending
        try:
            with stop, Watchdog(self.state.spans, limit, folder, looks, mends):
                self._run()
            self._close_trackers()
        except BaseException as error:
            self._close_trackers(exit_code=1)
            if isinstance(error, RolloutError) and self.replicas is not None and self.replicas.error:
                raise EngineLostError(self.replicas.error) from None  # the waiter's error has no further detail
            if isinstance(error, VerlError) and self.judges is not None:
                self.judges.check()  # nothing was scored, as the judge was given up
            raise
        finally:
            self._close_servers()
            self.schedule.stream.close()
            if self.replicas is not None:
                self.replicas.close()
            self.checkpoints.close()
            self.state.close()

    def _begin(self) -> StopSignals:
        """Make what a run has besides its workers."""
        stop = StopSignals(drop_at_once=self.worker_group_cls is LocalWorkerGroup)
        self.state = RunState(self.config, self.reward_fn, self.total_training_steps, self.steps_per_epoch, stop)
        self.state.teachers = self.teachers
        self.ctx = self.state.open(0)
        self.validator = None
        if self.val_loader is not None:
            self.validator = Validator(self.config, self.val_loader, self.val_reward_fn, self.texts)
        self.schedule = ScheduleRun(topology.schedule_of(self.config), self.state)
        self.checkpoints = RunCheckpoints(self.config, self.roles, self.source, self.state, self.schedule.stream)
        self.tracking, self._folders = None, {}
        return stop

    def _is_mending(self) -> bool:
        """Whether something that the run waits for is being replaced."""
        return waits_for_replica(self.replicas) or (self.judges is not None and self.judges.is_mending)

    def _run(self) -> None:
        self.load_checkpoint()
        self.ctx = self.state.open(self.state.step)
        runtime.write_config(self.config)
        with recorded_end(Path(self.config.trainer.default_local_dir), self.total_training_steps):
            tracking = self._open_trackers()
            samples = self.sample_folder("rollout_data_dir") if self.config.trainer.viewer else None
            with runtime.page_of_run(self.config, tracking, samples):
                self._run_from_here()

    def _run_from_here(self) -> None:
        self._notify("on_load")
        if self.replicas is not None:
            self.replicas.watch(partial(record.note_moved, self.state))
        self.checkpoints.remember()
        self.schedule.publish(self.roles, self.ctx)
        try:
            self._notify("on_fit_begin")
            if not self.config.trainer.val_only:
                self._run_steps()
            self.schedule.settle(self.roles, self.ctx)
            self._notify("on_fit_end")
            if self.state.ledger is not None:
                self.state.ledger.check(accounting.waiting_in(self.schedule.stream.held_samples()))
            self.state.updates.check()
        except StepDropped:
            raise self.state.stop.stopped(self.checkpoints.save_boundary()) from None

    def _open_trackers(self) -> Tracking:
        trainer, places = self.config.trainer, self.checkpoints.places
        self.tracking = Tracking(trainer.project_name, trainer.experiment_name, trainer.logger, to_dict(self.config))
        places |= self.tracking.start(self.total_training_steps, self.ctx.step, places)
        return self.tracking

    def _close_trackers(self, exit_code: int = 0) -> None:
        if self.tracking is not None:
            self.tracking.finish(exit_code)

    def sample_folder(self, setting: str) -> Path | None:
        """The folder that ``trainer.<setting>`` names, or one next to it if that holds the samples of another run."""
        target = self.config.trainer[setting]
        if target and setting not in self._folders:
            former = self.checkpoints.places.get(setting)
            folder = self._folders[setting] = folder_of_run(Path(target), self.checkpoints.resumed, former)
            self.checkpoints.places[setting] = folder.name
            if folder != Path(target):
                notice(f"trainer.{setting}", f"{target} holds another run's samples; those of this one go to {folder}")
        return self._folders.get(setting)

    def _run_steps(self) -> None:
        first = self.ctx.step + 1
        if first > self.total_training_steps:
            notice(
                "trainer.total_training_steps",
                f"the run is complete: step {self.ctx.step} of {self.total_training_steps}",
            )
        for step in range(first, self.total_training_steps + 1):
            self.state.step = step
            ctx = self.ctx = self.state.open(step)
            batch: DataProto | None = None
            try:
                with ctx.timed("step"):
                    self._notify("on_step_begin")
                    batch = self.schedule.step(self.source, self.roles, ctx)
                    self._notify("on_step_end", batch)
            except BaseException:
                if batch is not None and self.checkpoints.has_saved(step):
                    self._end_saved_step(batch)
                raise
            self._end_step(batch)
            if ctx.run.stop.requested and step < self.total_training_steps:
                raise StepDropped

    def _end_step(self, batch: DataProto) -> None:
        metrics = self._step_metrics(batch)
        self.log(metrics, self.ctx.step)
        self.state.spans.flush()  # before a checkpoint from which the step is not repeated
        self.checkpoints.end_step(metrics)

    def _end_saved_step(self, batch: DataProto) -> None:
        """The failure came after the save, which stands if metrics and ledger get the step. The error is re-raised."""
        try:
            self._end_step(batch)
        except Exception as second:  # boundary: a tracker, a disk; the first error is the one that is reported
            dropped = ", and its checkpoint is dropped" if self.checkpoints.discard() else ""
            notice("trainer.save_freq", f"the records of step {self.ctx.step} are not complete{dropped}: {second}")

    def _notify(self, hook: str, *arguments: Any) -> None:
        for callback in (self._first, *self.callbacks, self._last):
            getattr(callback, hook)(self, *arguments)

    def _step_metrics(self, batch: DataProto) -> dict[str, float]:
        ctx = self.ctx
        ranks = self.resource_pool_manager.get_n_gpus()
        skipped = 0.0 if ctx.run.needs_old_log_prob else 1.0
        return {
            "training/global_step": ctx.step,
            "training/epoch": ctx.run.epoch_of(ctx.step),
            "training/old_log_prob_skipped": skipped,
            **build.speed_of_training(ctx.metrics.values(), ctx.timers.seconds, ranks, self.config),
            **compute_data_metrics(
                batch,
                use_critic="critic" in self.roles,
                max_prompt_length=self.config.data.max_prompt_length,
                max_response_length=self.config.data.max_response_length,
            ),
            **compute_variance_proxy_metrics(batch, ctx.metrics.values().get("actor/grad_norm")),
            **compute_timing_metrics(batch, ctx.timers.seconds),
            **compute_throughout_metrics(batch, ctx.timers.seconds, ranks),
            **build.memory_metrics(self.config),
            **{f"perf/controller/{name}_mb": counted / 1e6 for name, counted in traffic.take().items()},
            **({} if self.replicas is None else self.replicas.metrics()),
            **({} if self.judges is None else self.judges.metrics()),
        }

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send metrics to every tracker."""
        if self.tracking is not None:
            self.tracking.log(metrics, step)

    def show_samples(self, title: str, shown: list[Sample]) -> None:
        """Send a few completions to the trackers that can show text."""
        if self.tracking is not None:
            self.tracking.log_samples(title, shown, self.ctx.step)

    # ---- pieces that users override ----------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Validate with the sampler's current weights; returns the metrics."""
        return self._validate()

    def _validate(self, merged: bool = False) -> dict[str, float]:
        """As `validate`, under the name that upstream's trainers override; ``merged`` has no effect."""
        if self.validator is None:
            raise DataError("there is nothing to validate on", key="data.val_files", fix="Set data.val_files.")
        self.schedule.settle(self.roles, self.ctx)
        metrics, seen = self.validator.run(self.roles, self.ctx.step)
        self.on_validation_samples(seen)
        check_metric(self.config.trainer, metrics)
        return metrics

    def on_validation_samples(self, seen: ValidationSamples) -> None:
        """Dump (``trainer.validation_data_dir``) and log (``trainer.log_val_generations``) what was sampled."""
        folder = self.sample_folder("validation_data_dir")
        build.report_validation(self.config, self.tracking, seen, self.ctx.step, folder)

    def describe_samples(self, batch: DataProto) -> dict[str, Any]:
        """Prompt, response, score and reward details of every row as text, for dumps and the console."""
        prompts, responses = self.texts.of(batch)
        truths = batch.non_tensor_batch.get("reward_model", np.full(len(batch), None, dtype=object))
        extra = {name: list(batch.non_tensor_batch[name]) for name in batch.meta_info.get(group_filter.DETAILS, ())}
        columns: dict[str, list[Any]] = {
            **ends_of(batch),
            **conversation_columns(batch),
            **self.texts.columns(batch),
            **accounting.names_of(batch),
        }
        if both := sorted(columns.keys() & extra.keys()):
            notice("trainer.rollout_data_dir", f"the reward function returns {', '.join(both)}, which files of samples "
                   "use for something else: its values are written as reward_<name> there. Rename them")  # fmt: skip
        return {
            "inputs": prompts,
            "outputs": responses,
            "gts": [truth.get("ground_truth") if isinstance(truth, dict) else None for truth in truths],
            "scores": shared(batch, batch.tensors["token_level_scores"].sum(-1)).tolist(),
            "reward_extra_infos": {
                **{f"reward_{name}" if name in columns else name: values for name, values in extra.items()},
                **columns,
            },
        }

    def compute_rollout_importance_weights_and_add_to_batch(
        self, batch: DataProto
    ) -> tuple[DataProto, dict[str, float]]:
        """Add ``rollout_is_weights`` (``algorithm.rollout_is_*``) to a batch; returns it and ``mismatch/`` metrics."""
        algorithm = self.config.algorithm
        if algorithm.rollout_is_threshold is None or "rollout_log_probs" not in batch.tensors.keys():
            return batch, {}
        return batch, correction.correct(batch, algorithm)

    def save_checkpoint(self) -> None:
        """Write a checkpoint of this step."""
        self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        self.checkpoints.save()

    def load_checkpoint(self) -> None:
        """Resume an earlier run (``trainer.resume_mode``)."""
        self._load_checkpoint()

    def _load_checkpoint(self) -> None:
        self.checkpoints.load()


def compute_advantage(
    data: DataProto,
    adv_estimator: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Upstream's form of `stages.compute_advantage`: adds ``advantages`` and ``returns`` to ``data`` and returns it."""
    settings = build.AdvantageSettings(gamma, lam, norm_adv_by_std_in_grpo, config)
    stages.compute_advantage(data, ADVANTAGE_ESTIMATORS.get(adv_estimator), settings)
    return data


def apply_kl_penalty(data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[DataProto, dict[str, float]]:
    """Upstream's form of `stages.charge_kl`: writes token_level_rewards into ``data``."""
    return data, stages.charge_kl(data, kl_ctrl, kl_penalty)


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """The attention mask over the response part, (B, T)."""
    return data.tensors["attention_mask"][:, -data.tensors["responses"].size(1) :]

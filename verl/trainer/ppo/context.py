"""What a step needs besides the batch and the roles: the state of the run, and its own context.

`RunState` outlives steps, `StepContext` is what the stages of one step write into. `collect` of the next step and
`learn` of this one may be open at once: each has a `StepContext`, and both know the one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from verl.agent_loop.unfinished import ENOUGH
from verl.algorithms.calls import names_parameter
from verl.algorithms.kl import get_kl_controller
from verl.config import PPOTrainerConfig
from verl.config.root import learns_from_pairs, reads_ref_log_prob, skips_old_log_prob
from verl.errors import ConfigError, DataError
from verl.journal.account import Key
from verl.journal.file import Journal
from verl.journal.ledger import Ledger
from verl.journal.schedule import ScheduleRecord, Script
from verl.journal.spans import Spans
from verl.metrics import MetricSet, Timers, notice
from verl.protocol import DataProto
from verl.registry import ADVANTAGE_ESTIMATORS
from verl.trainer.ppo.replay import RolloutReplay
from verl.trainer.ppo.unfinished import UnfinishedPrompts
from verl.trainer.signals import StopSignals
from verl.trainer.watch import Updates

ABOUT_THE_REQUEST = ("global_steps", "validate", "do_sample", ENOUGH)
"""Keys of ``meta_info`` that are about one call of the sampler."""


MANY_GEN_BATCHES = 10
"""So many batches of prompts for one step are worth a notice."""


class SamplePool:
    """Scored samples for the training batch; the surplus starts the next one.

    Args:
        rows: samples of one training batch (prompts x ``rollout.n``).
    """

    def __init__(self, rows: int):
        self.rows = rows
        self.sample_info: dict[str, list[Any]] = {}
        """What the scorer returned besides the scores of the latest samples, by name."""
        self._parts: list[DataProto] = []

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def is_full(self) -> bool:
        return len(self) >= self.rows

    def add(self, samples: DataProto) -> None:
        """Add samples, without the facts about their request, since a batch may span several steps."""
        if len(samples):
            samples.meta_info = {k: v for k, v in samples.meta_info.items() if k not in ABOUT_THE_REQUEST}
            self._parts.append(samples)

    def peek(self) -> DataProto | None:
        """All samples in the pool, or None; the pool keeps them."""
        if not self._parts:
            return None
        return self._parts[0] if len(self._parts) == 1 else together(self._parts)

    def keep_only(self, rows: np.ndarray) -> None:
        """Keep these rows (indices), in their order, and drop the others."""
        waiting = self.peek()
        kept = [] if waiting is None or not len(rows) else [waiting.select_idxs(rows)]
        self._parts = kept

    def take(self) -> DataProto:
        """Exactly one training batch, in the order of sampling; groups are adjacent and stay whole."""
        whole = self.peek()
        assert whole is not None, "an empty pool has no batch"
        batch, rest = whole.slice(0, self.rows), whole.slice(self.rows, None)
        self._parts = [rest] if len(rest) else []
        batch.meta_info = dict(batch.meta_info)
        return batch


def together(parts: Sequence[DataProto]) -> DataProto:
    """Samples of several calls of the sampler as one batch, which has the columns of every part.

    A part lacks a column where nothing happened that it tells of (``agent_error``, why a conversation ``ended``, a
    detail of the score): None stands there. A tensor is kept where all parts have it.
    """
    names = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    tensors = [set[str]() if part.batch is None else set(part.batch.keys()) for part in parts]
    shared, alike = set.intersection(*tensors), []
    for part, there in zip(parts, tensors):
        lacks = {name: np.full(len(part), None, dtype=object) for name in names if name not in part.non_tensor_batch}
        if lacks or there != shared:
            part = part.select(batch_keys=sorted(shared))
            part.non_tensor_batch = {**part.non_tensor_batch, **lacks}
        alike.append(part)
    return DataProto.concat(alike)


@dataclass
class RunState:
    """What outlives a step.

    Args:
        config: the configuration of the run.
        reward: scores samples; returns ``reward_tensor``, ``reward_extra_info`` and ``unscorable``.
        total_steps: length of the run.
        steps_per_epoch: batches of prompts in an epoch.
        stop: whether a signal asks the run to end.
        step: the last step that has begun; 0 before the first.
        journal: what the run writes of itself; None in a run that keeps none.
        ledger: what became of every sample, in the journal; None in a run that keeps none.
        spans: when the stages of all steps began and ended.
        record: the decisions of an asynchronous schedule; None in a run that keeps none.
        updates: the optimizer steps that were taken and skipped.
    """

    config: PPOTrainerConfig
    reward: Callable[..., dict[str, Any]]
    total_steps: int
    steps_per_epoch: int = 1
    stop: StopSignals = field(default_factory=StopSignals)
    step: int = 0
    journal: Journal | None = None
    ledger: Ledger | None = None
    spans: Spans = field(default_factory=Spans)
    record: ScheduleRecord | None = None
    updates: Updates = field(default_factory=Updates)

    def __post_init__(self) -> None:
        config = self.config
        self.estimator = ADVANTAGE_ESTIMATORS.get(config.algorithm.adv_estimator)
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.replay = RolloutReplay.of(config)
        if self.replay is not None and self.replay.repeats and names_parameter(self.estimator, "reward_baselines"):
            raise ConfigError(
                "the greedy responses are to this step's prompts, and repeated samples to another's",
                key="skip.rollout.action",
                got="repeat",
                allowed=["cache"],
            )
        self.pool = SamplePool(config.data.train_batch_size * self.samples_per_prompt)
        self.unfinished = UnfinishedPrompts.of(config)

    def open(self, step: int) -> StepContext:
        """The empty context of a step; that of another step may be open, too."""
        return StepContext(self, step)

    @property
    def script(self) -> Script | None:
        """The recorded schedule that the run follows."""
        return None if self.record is None else self.record.script

    @property
    def samples_per_prompt(self) -> int:
        return self.config.actor_rollout_ref.rollout.n

    @property
    def trained_per_prompt(self) -> int:
        """Rows of each prompt in an update: all its samples, or its pair."""
        return 2 if self.learns_from_pairs else self.samples_per_prompt

    @property
    def learns_from_pairs(self) -> bool:
        """The actor's loss compares the best and the worst answer to each prompt."""
        return learns_from_pairs(self.config)

    @property
    def needs_old_log_prob(self) -> bool:
        """False where nothing reads them and the policy cannot have moved since sampling, and in the bypass mode."""
        if self.bypasses_old_log_prob:
            return False
        return not skips_old_log_prob(self.config) or names_parameter(self.estimator, "old_log_probs")

    @property
    def bypasses_old_log_prob(self) -> bool:
        """The sampler's log-probs replace the recomputed ones."""
        return self.config.algorithm.rollout_correction.bypass_mode

    @property
    def needs_sum_pi_squared(self) -> bool:
        """The estimator reads the sum of squared probabilities, or the configuration asks for it."""
        wanted = self.config.actor_rollout_ref.actor.calculate_sum_pi_squared
        return wanted or names_parameter(self.estimator, "sum_pi_squared")

    @property
    def charges_exact_kl(self) -> bool:
        """The reward pays for the KL over the whole vocabulary, which the actor's workers compute."""
        return self.config.algorithm.use_kl_in_reward and self.config.algorithm.kl_penalty == "full"

    @property
    def needs_ref_log_prob(self) -> bool:
        """The reference's log-probs of the sampled tokens are read; the exact KL does without."""
        return reads_ref_log_prob(self.config) or names_parameter(self.estimator, "ref_log_prob")

    @property
    def needs_reward_baselines(self) -> bool:
        """The estimator compares with the reward of a greedy response (ReMax)."""
        return names_parameter(self.estimator, "reward_baselines")


def _of_run(name: str) -> Any:
    """A fact of the run that every context of it knows."""
    return property(attrgetter(f"run.{name}"))


class StepContext:
    """What a stage gets: the context of one step, or of one half of it, which knows its run.

    Args:
        run: the state of the run, which all contexts share.
        step: number of the step, from 1.

    Attributes:
        epoch: the epoch of the step's first prompt, from 0.
        metrics: of this step alone.
        timers: seconds per stage (`timed`).
        sample_info: what the scorer returned besides the scores of this step's samples, by name.
        gen_batches: batches of prompts that were sampled for this step.
        learned_from: the samples that the update learns from, where a method selects them; None: all of the batch.
        lengths, shares: tokens of the rows that were learned from so far; which of them each rank of the actor had.
        goes_on: this step learns from more batches after this one, so what happens once per step does not happen yet.
    """

    def __init__(self, run: RunState, step: int = 0):
        self.run, self.step = run, step
        self.epoch = max(0, step - 1) // run.steps_per_epoch
        self.metrics, self.timers = MetricSet(), Timers()
        self.sample_info: dict[str, list[Any]] = {}
        self.gen_batches = 0
        self.learned_from: set[Key] | None = None
        self.lengths: list[int] = []
        self.shares: list[list[int]] = []
        self.goes_on = False

    config: PPOTrainerConfig = _of_run("config")
    reward: Callable[..., dict[str, Any]] = _of_run("reward")
    total_steps: int = _of_run("total_steps")
    stop: StopSignals = _of_run("stop")
    ledger: Ledger | None = _of_run("ledger")
    spans: Spans = _of_run("spans")
    pool: SamplePool = _of_run("pool")
    unfinished: UnfinishedPrompts | None = _of_run("unfinished")
    replay: RolloutReplay | None = _of_run("replay")
    estimator: Callable[..., Any] = _of_run("estimator")
    kl_controller: Any = _of_run("kl_controller")
    samples_per_prompt: int = _of_run("samples_per_prompt")
    trained_per_prompt: int = _of_run("trained_per_prompt")
    learns_from_pairs: bool = _of_run("learns_from_pairs")
    needs_old_log_prob: bool = _of_run("needs_old_log_prob")
    bypasses_old_log_prob: bool = _of_run("bypasses_old_log_prob")
    needs_sum_pi_squared: bool = _of_run("needs_sum_pi_squared")
    charges_exact_kl: bool = _of_run("charges_exact_kl")
    needs_ref_log_prob: bool = _of_run("needs_ref_log_prob")
    needs_reward_baselines: bool = _of_run("needs_reward_baselines")

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Seconds spent inside are reported as ``timing_s/<stage>``, and are a span of the run's trace."""
        with self.spans.span(stage, self.step), self.timers(stage):
            yield

    def take_in(self, half: StepContext) -> None:
        """Add another context of the same step: `collect` may have run ahead, during an earlier step."""
        assert half.step == self.step, f"a context of step {half.step} was given to step {self.step}"
        self.metrics.merge(half.metrics)
        for stage, seconds in half.timers.seconds.items():
            self.timers.seconds[stage] = self.timers.seconds.get(stage, 0.0) + seconds
        self.sample_info = half.sample_info
        self.gen_batches += half.gen_batches

    def state_dict(self) -> dict[str, Any]:
        """The context of a `collect` that ran ahead, as JSON values; the samples' own columns are in the batch."""
        return {
            "step": self.step,
            "metrics": {name: [m.value, m.reduction, m.weight] for name, m in self.metrics.items()},
            "seconds": dict(self.timers.seconds),
            "sample_info": list(self.sample_info),
            "gen_batches": self.gen_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any], batch: DataProto) -> None:
        """Continue from what `state_dict` returned, with the batch that was collected."""
        assert state["step"] == self.step, f"the context is of step {state['step']}, not of step {self.step}"
        for name, (value, reduction, weight) in state["metrics"].items():
            self.metrics.add(name, value, reduction, weight)
        self.timers.seconds.update(state["seconds"])
        columns = batch.non_tensor_batch
        self.sample_info = {name: list(columns[name]) for name in state["sample_info"] if name in columns}
        self.gen_batches = int(state["gen_batches"])

    @property
    def moves_reference(self) -> bool:
        """After this step's update the reference policy becomes the actor's (``trainer.ref_update_freq``)."""
        every = self.config.trainer.ref_update_freq
        return every is not None and self.step % every == 0 and not self.goes_on

    @property
    def may_sample_more(self) -> int:
        """Batches of prompts that are sampled together with the next one: none beyond the limit of a step."""
        rule = self.config.algorithm.filter_groups
        if not rule.enable:
            return 0
        limit = rule.max_num_gen_batches
        left = limit - self.gen_batches if limit > 0 else rule.max_inflight_gen_batches
        return max(0, min(rule.max_inflight_gen_batches, left) - 1)

    def count_gen_batch(self) -> None:
        """One more batch of prompts was sampled for this step; an endless refill is an error."""
        self.gen_batches += 1
        limit = self.config.algorithm.filter_groups.max_num_gen_batches
        if 0 < limit < self.gen_batches:
            raise DataError(
                f"{limit} batches of prompts were sampled, only {len(self.pool)} of {self.pool.rows} samples kept",
                key="algorithm.filter_groups.max_num_gen_batches",
                fix="The task is too easy or too hard for this model: change the data, raise the limit or set it to 0.",
            )
        if limit <= 0 and self.gen_batches == MANY_GEN_BATCHES:
            notice(
                "algorithm.filter_groups.max_num_gen_batches",
                f"step {self.step} samples batch {self.gen_batches} of prompts, with {len(self.pool)} of "
                f"{self.pool.rows} samples kept; without a limit it goes on until the batch is full",
            )

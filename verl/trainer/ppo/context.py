"""What a step needs besides the batch and the roles: the state of the run, and its own context.

`RunState` outlives steps, `StepContext` is what the stages of one step write into. `collect` of the next step and
`learn` of this one may be open at once: each has a `StepContext`, and both know the one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.algorithms.calls import names_parameter
from verl.algorithms.kl import get_kl_controller
from verl.config import PPOTrainerConfig
from verl.config.schema.root import learns_from_pairs, reads_ref_log_prob, skips_old_log_prob
from verl.journal.file import Journal
from verl.journal.ledger import Ledger
from verl.journal.schedule import ScheduleRecord, Script
from verl.journal.spans import Spans
from verl.metrics import MetricSet, Timers
from verl.models.router_replay import COLUMN as EXPERTS
from verl.registry import ADVANTAGE_ESTIMATORS
from verl.trainer.signals import StopSignals
from verl.trainer.watch import Updates

if TYPE_CHECKING:
    from verl.workers.served_teachers import ServedTeachers


@dataclass
class RunState:
    """What outlives a step.

    Args:
        reward: scores samples; returns ``reward_tensor``, ``reward_extra_info`` and ``unscorable``.
        stop: whether a signal asks the run to end.
        step: the last step that has begun; 0 before the first.
        journal: what the run writes of itself; None in a run that keeps none.
        ledger: what became of every sample, in the journal; None in a run that keeps none.
        spans: when the stages of all steps began and ended.
        record: the decisions of an asynchronous schedule; None in a run that keeps none.
        updates: the optimizer steps that were taken and skipped.
        teachers: those behind servers; None in a run without any.
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
    teachers: ServedTeachers | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.estimator = ADVANTAGE_ESTIMATORS.get(config.algorithm.adv_estimator)
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)

    def epoch_of(self, step: int) -> int:
        """The epoch of a step's first prompt, from 0."""
        return max(0, step - 1) // self.steps_per_epoch

    def open(self, step: int) -> StepContext:
        """The empty context of a step; that of another step may be open, too."""
        return StepContext(self, step)

    def close(self) -> None:
        """End what the run writes of itself."""
        self.spans.flush()
        if self.journal is not None:
            self.journal.close()

    @property
    def script(self) -> Script | None:
        """The recorded schedule that the run follows."""
        return None if self.record is None else self.record.script

    @property
    def samples_per_prompt(self) -> int:
        return self.config.actor_rollout_ref.rollout.n

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
        is_configured = self.config.actor_rollout_ref.actor.calculate_sum_pi_squared
        return is_configured or names_parameter(self.estimator, "sum_pi_squared")

    @property
    def outputs_read(self) -> dict[str, str]:
        """What else the pass over old log-probs brings, and its column.

        The exact KL is over all of the vocabulary; the actor's experts are those that its update replays.
        """
        algorithm = self.config.algorithm
        charges_exact_kl = algorithm.use_kl_in_reward and algorithm.kl_penalty == "full"
        replays_its_experts = self.config.actor_rollout_ref.actor.router_replay.mode == "R2"
        return {
            **({"sum_pi_squared": "sum_pi_squared"} if self.needs_sum_pi_squared else {}),
            **({"full_kl": "ref_kl"} if charges_exact_kl else {}),
            **({EXPERTS: EXPERTS} if replays_its_experts else {}),
        }

    @property
    def dumps_tokens(self) -> bool:
        """Files of samples with their tokens are written, and have the entropy of each token."""
        return bool(self.config.trainer.rollout_data_dir) and self.config.trainer.rollout_data_tokens > 0

    @property
    def needs_ref_log_prob(self) -> bool:
        """The reference's log-probs of the sampled tokens are read; the exact KL does without."""
        return reads_ref_log_prob(self.config) or names_parameter(self.estimator, "ref_log_prob")

    @property
    def needs_reward_baselines(self) -> bool:
        """The estimator compares with the reward of a greedy response (ReMax)."""
        return names_parameter(self.estimator, "reward_baselines")


class StepContext:
    """What a stage gets: where the run is, and what it reports of one step (from 1), or of its sampling alone.

    Attributes:
        metrics: of this step alone.
        timers: seconds per stage (`timed`).
        flat_rows: ``__row__`` of the prompts that dynamic sampling dropped since the batch before, for a curriculum.
        goes_on: this step learns from more batches after this one, so what happens once per step does not happen yet.
    """

    def __init__(self, run: RunState, step: int = 0):
        self.run, self.step = run, step
        self.metrics, self.timers, self.flat_rows = MetricSet(), Timers(), list[int]()
        self.goes_on = False

    @property
    def config(self) -> PPOTrainerConfig:
        """Of the run."""
        return self.run.config

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Seconds spent inside are reported as ``timing_s/<stage>``, and are a span of the run's trace."""
        with self.run.spans.span(stage, self.step), self.timers(stage):
            yield

    def take_in(self, part: StepContext) -> None:
        """Add another context of the same step, whose batch was sampled ahead, during an earlier step."""
        assert part.step == self.step, f"a context of step {part.step} was given to step {self.step}"
        self.metrics.merge(part.metrics)
        for stage, seconds in part.timers.seconds.items():
            self.timers.seconds[stage] = self.timers.seconds.get(stage, 0.0) + seconds

    def state_dict(self) -> dict[str, Any]:
        """The context of a batch that was sampled ahead, as JSON values."""
        return {
            "step": self.step,
            "metrics": {name: [m.value, m.reduction, m.weight] for name, m in self.metrics.items()},
            "seconds": dict(self.timers.seconds),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        assert state["step"] == self.step, f"the context is of step {state['step']}, not of step {self.step}"
        for name, (value, reduction, weight) in state["metrics"].items():
            self.metrics.add(name, value, reduction, weight)
        self.timers.seconds.update(state["seconds"])

    @property
    def moves_reference(self) -> bool:
        """After this step's update the reference policy becomes the actor's (``trainer.ref_update_freq``)."""
        every = self.config.trainer.ref_update_freq
        return every is not None and self.step % every == 0 and not self.goes_on

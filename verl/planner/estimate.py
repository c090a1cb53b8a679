"""What a run takes on a cluster: bytes and seconds, and what to change where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from verl.errors import ConfigError
from verl.json_text import JsonObject
from verl.planner.engines import sampler_costs, trainer_costs
from verl.planner.from_config import RunPlan
from verl.planner.hardware import Cluster
from verl.planner.layout import RolePlan, Workload
from verl.planner.memory import Memory, memory_of, pool_memory, sequence_cache
from verl.planner.ranges import Range
from verl.planner.seconds import Seconds, seconds_of, stage_seconds, step_seconds

USABLE = 0.94
"""Share of a device's memory that tensors can take; the rest is the driver's context and fragments: an assumption."""
HOUR = 3600.0
PROCESS = 3e9
"""Bytes on the host of a process with its libraries and its accelerator's context: an assumption."""
TOKEN = 64
"""Bytes on the host per token of a step: ids, masks, log-probs, values, advantages (an assumption of eight columns)."""


@dataclass(frozen=True)
class PoolPeak:
    """The most that a device of a pool holds.

    Args:
        pool: its name.
        role, phase: who works then, and on what; the other roles of the pool idle.
        total: bytes per device.
    """

    pool: str
    role: str
    phase: str
    total: float


@dataclass(frozen=True)
class Estimate:
    """A run on a cluster.

    Args:
        run: its roles and its work.
        cluster: the devices.
        memory, seconds: of each role, in the order of the run's.
    """

    run: RunPlan
    cluster: Cluster
    memory: tuple[Memory, ...]
    seconds: tuple[Seconds, ...]

    @classmethod
    def of(cls, run: RunPlan, cluster: Cluster) -> Estimate:
        """By the cost model.

        Raises:
            ConfigError: an engine, a sampler or an optimizer without costs.
        """
        device = cluster.device
        memory = tuple(memory_of(plan, run.shapes[plan.role], run.work, device) for plan in run.roles)
        pool = next((plan.pool for plan in run.roles if plan.role == "actor"), "")
        seconds = tuple(
            seconds_of(plan, run.shapes[plan.role], run.work, cluster, plan.pool == pool) for plan in run.roles
        )
        return cls(run, cluster, memory, seconds)

    def peaks(self) -> list[PoolPeak]:
        """Of each pool."""
        peaks: dict[str, PoolPeak] = {}
        for plan, memory in zip(self.run.roles, self.memory, strict=True):
            pool = [m for p, m in zip(self.run.roles, self.memory, strict=True) if p.pool == plan.pool]
            for phase in memory.phases:
                total = pool_memory(pool, phase.phase, plan.role)
                if plan.pool not in peaks or total > peaks[plan.pool].total:
                    peaks[plan.pool] = PoolPeak(plan.pool, plan.role, phase.phase, total)
        return list(peaks.values())

    def hosts(self) -> dict[str, dict[str, float]]:
        """Pool -> bytes by term on the host of one machine of its; pools that share a machine add up.

        The batch of a step is on the machine of the driver alone.
        """
        hosts = {}
        for pool in dict.fromkeys(plan.pool for plan in self.run.roles):
            roles = [number for number, plan in enumerate(self.run.roles) if plan.pool == pool]
            devices = self.run.roles[roles[0]].devices
            each = devices if self.cluster.device.is_cpu else min(devices, self.cluster.device.node)
            hosts[pool] = {
                "offloaded": each * sum(self.memory[number].offload for number in roles),
                "checkpoint": each * sum(self.memory[number].snapshot for number in roles),
                "processes": each * PROCESS,
                "batch": TOKEN * float(self.run.work.sequences * self.run.work.longest),
            }
        return hosts

    @property
    def step(self) -> Range:
        """Seconds of a step; asynchronous schedules overlap generation with the rest of it."""
        return step_seconds(self.run.roles, self.seconds, self.run.overlaps)

    def phase(self, name: str) -> Range:
        """Seconds of a phase over all roles, or of a ``step``."""
        return self.step if name == "step" else stage_seconds(self.run.roles, self.seconds, name)

    @property
    def tokens_per_second(self) -> float:
        """Prompts and responses of a step over its likely seconds, all devices together."""
        return self.run.work.tokens / self.step.likely

    @property
    def device_hours_per_step(self) -> float:
        """Of all devices in one likely step."""
        return self.run.devices * self.step.likely / HOUR

    @property
    def device_hours(self) -> float | None:
        """Of all devices in the run; None where the configuration does not say how many steps it has."""
        steps = self.run.work.steps
        return None if steps is None else steps * self.device_hours_per_step

    @property
    def checkpoint_bytes(self) -> float:
        """Of one checkpoint."""
        return sum(memory.checkpoint for memory in self.memory)

    def problems(self) -> list[ConfigError]:
        """What does not fit: devices, memory of each pool, the KV cache of one sequence."""
        available, needed = self.cluster.devices, self.run.devices
        problems = []
        if needed > available:
            fix = "Make a pool smaller, or take more devices."
            message, key = "the run has more processes than there are devices", "trainer.n_gpus_per_node"
            problems.append(ConfigError(message, key=key, got=needed, allowed=f"at most {available}", fix=fix))
        room = USABLE * self.cluster.device.memory
        problems += [self._too_large(peak, room) for peak in self.peaks() if peak.total > room]
        return problems + list(self._caches())

    def _caches(self) -> Iterator[ConfigError]:
        """Samplers whose cache does not hold the longest sequence."""
        for plan, memory in zip(self.run.roles, self.memory, strict=True):
            if not plan.samples or not sampler_costs(plan.engine).reserves:
                continue
            longest = sequence_cache(plan, self.run.shapes[plan.role], self.run.work.longest)
            room = memory.phase("generate").kv_cache
            if room < longest:
                fix = "Raise it, or actor_rollout_ref.rollout.tensor_model_parallel_size; or take another device."
                message = (
                    f"the KV cache of one sequence of {self.run.work.longest} tokens takes {_gb(longest)} per device"
                )
                key = "actor_rollout_ref.rollout.gpu_memory_utilization"
                yield ConfigError(f"{message}, and {_gb(room)} are left", key=key, got=plan.memory_fraction, fix=fix)

    def _too_large(self, peak: PoolPeak, room: float) -> ConfigError:
        plan = next(plan for plan in self.run.roles if plan.role == peak.role)
        memory = self.memory[self.run.roles.index(plan)]
        term = memory.phase(peak.phase).dominant.replace("_", " ")
        message = f"the pool {peak.pool!r} takes {_gb(peak.total)} per device in the phase {peak.phase} of {peak.role}"
        fix = f"Most are {term}. " + (self._cheapest(peak, room) or "No single change makes it fit: take more devices.")
        allowed = f"{_gb(room)} ({USABLE:.0%} of {self.cluster.device.name})"
        key = "actor_rollout_ref.rollout" if plan.samples else SECTIONS.get(peak.role, peak.role)
        return ConfigError(message, key=key, got=_gb(peak.total), allowed=allowed, fix=fix)

    def _cheapest(self, peak: PoolPeak, room: float) -> str:
        """The first of `CHANGES` that makes the pool fit, as an override."""
        for settings, change in CHANGES:
            roles = tuple(change(p, self.run.work) if p.pool == peak.pool else p for p in self.run.roles)
            if roles == self.run.roles:
                continue
            changed = Estimate.of(replace(self.run, roles=roles), self.cluster)
            fits = all(new.total <= room for new in changed.peaks() if new.pool == peak.pool)
            if fits and not list(changed._caches()):
                return f"The cheapest change that makes it fit: {settings}."
        return ""

    def to_json(self) -> JsonObject:
        """Everything, bytes and seconds as numbers."""
        return {
            "device": self.cluster.device.name,
            "devices": self.run.devices,
            "memory": [asdict(memory) for memory in self.memory],
            "peaks": [asdict(peak) for peak in self.peaks()],
            "hosts": self.hosts(),
            "seconds": [asdict(seconds) for seconds in self.seconds],
            "step": asdict(self.step),
            "tokens_per_second": self.tokens_per_second,
            "device_hours": self.device_hours,
            "device_hours_per_step": self.device_hours_per_step,
            "checkpoint_bytes": self.checkpoint_bytes,
            "problems": [str(problem) for problem in self.problems()],
        }


SECTIONS = {
    "actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
    "rm": "reward.reward_model",
}
"""Role -> its section of the configuration."""


def _offloaded(plan: RolePlan, work: Workload) -> RolePlan:
    return plan if plan.samples else replace(plan, param_offload=True, optimizer_offload=True)


def _on_host(plan: RolePlan, work: Workload) -> RolePlan:
    return plan if plan.samples else replace(plan, offload_policy=trainer_costs(plan.engine).offloads)


def _fused(plan: RolePlan, work: Workload) -> RolePlan:
    fuses_head = not plan.samples and trainer_costs(plan.engine).fuses_head
    return replace(plan, fused_head="torch") if fuses_head and not plan.fused_head else plan


def _adapted(plan: RolePlan, work: Workload) -> RolePlan:
    adapts = plan.role == "actor" and trainer_costs(plan.engine).adapts
    return replace(plan, lora_rank=plan.lora_rank or 32) if adapts else plan


def _fewer_tokens(plan: RolePlan, work: Workload) -> RolePlan:
    """A quarter of the budgets, but the longest row."""
    if plan.samples:
        return plan
    least = -(-work.longest // plan.parallel.sequence)
    update, infer = (max(least, tokens // 4) for tokens in (plan.micro_tokens, plan.infer_tokens))
    return replace(plan, micro_tokens=update, infer_tokens=infer)


def _recomputing(plan: RolePlan, is_megatron: bool) -> RolePlan:
    """Megatron reads another setting than the other engines."""
    applies = plan.trains and trainer_costs(plan.engine).optimizer_over_data == is_megatron
    return replace(plan, recompute=True) if applies else plan


CHANGES: tuple[tuple[str, Callable[[RolePlan, Workload], RolePlan]], ...] = (
    ("enable_gradient_checkpointing=true in the model's section", lambda plan, _: _recomputing(plan, False)),
    (
        "recompute_granularity=full in the role's override_transformer_config",
        lambda plan, _: _recomputing(plan, True),
    ),
    ("use_fused_kernels=true in the model's section", _fused),
    (
        "a quarter of the tokens per micro-batch, or one row (ppo_max_token_len_per_gpu with use_dynamic_bsz)",
        _fewer_tokens,
    ),
    (
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        lambda plan, _: replace(plan, memory_fraction=min(plan.memory_fraction, 0.4)),
    ),
    ("param_offload=true and optimizer_offload=true of each role", _offloaded),
    ("offload_policy=true of each role on fsdp2", _on_host),
    ("actor_rollout_ref.model.lora_rank=32: an adapter instead of all weights", _adapted),
)
"""What to change, the change that costs the run least first."""


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB"

"""A plan with what it beats, and the overrides that make a run of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from verl.errors import ConfigError
from verl.json_text import JsonObject
from verl.planner.choices import DATA_ONLY, SEQUENCE, TENSOR, grid_of, present_placement, space_of
from verl.planner.engines import sampler_costs
from verl.planner.estimate import SECTIONS, USABLE
from verl.planner.from_config import MODELS, RunPlan
from verl.planner.hardware import Cluster
from verl.planner.layout import RolePlan
from verl.planner.search import PlacementSearch, explanation
from verl.planner.space import ACTOR, ASYNC, SAMPLER, SYNC, PlacementPlan, PoolPlan

_ROLLOUT = "actor_rollout_ref.rollout"
MODES = {SYNC: "sync", ASYNC: "one_step_off"}
"""Schedule of a plan -> its ``trainer.v1.trainer_mode``."""


@dataclass(frozen=True)
class Proposal:
    """What ``plan`` answers.

    Args:
        cluster: the devices.
        plan: the fastest placement.
        others: a title and a placement each: the best of other kinds, and the configuration's.
        replaces_pools: the configuration names pools, which the overrides delete.
    """

    cluster: Cluster
    plan: PlacementPlan[RolePlan]
    others: tuple[tuple[str, PlacementPlan[RolePlan]], ...]
    replaces_pools: bool = False

    @property
    def memory(self) -> float:
        """Bytes of a device that a plan may fill."""
        return USABLE * self.cluster.device.memory

    def to_json(self) -> JsonObject:
        """Bytes and seconds as numbers."""
        generation, preparation, training = self.plan.stages
        return {
            "device": self.cluster.device.name,
            "devices": self.plan.devices,
            "schedule": self.plan.schedule,
            "seconds": self.plan.seconds,
            "stages": {"generation": generation, "preparation": preparation, "training": training},
            "pools": [
                {
                    "devices": pool.devices,
                    "bytes": pool.bytes,
                    "roles": {role: asdict(choice) for role, choice in pool.choices.items()},
                    "costs": {role: asdict(cost) for role, cost in pool.costs.items()},
                }
                for pool in self.plan.pools
            ],
            "others": {title: other.seconds for title, other in self.others},
            "overrides": overrides(self.plan, self.cluster, self.replaces_pools),
        }


def proposal(run: RunPlan, cluster: Cluster, schedules: tuple[str, ...] = (SYNC, ASYNC), present: str = SYNC
             ) -> Proposal:  # fmt: skip
    """The fastest placement of a run.

    Args:
        run: as the configuration has it.
        schedules: that are admitted.
        present: of the configuration, to compare with.

    Raises:
        NoPlacement: nothing fits; with what each role needs.
        ConfigError: an asynchronous schedule without a sampler.
    """
    if schedules == (ASYNC,) and SAMPLER not in run.shapes:
        raise ConfigError("an asynchronous step needs a sampler", key="--schedule", got=ASYNC, allowed=[SYNC])
    search = PlacementSearch(space_of(run.roles, run.shapes, run.work, cluster, schedules))
    plan = search.best()
    if plan is None:
        raise explanation(search)
    itself = present_placement(run.roles, run.shapes, run.work, cluster, present)
    others = [*((str(other), other) for other in search.runners_up(plan)), ("the configuration itself", itself)]
    return Proposal(cluster, plan, tuple(others), run.has_pools)


def overrides(plan: PlacementPlan[RolePlan], cluster: Cluster, replaces_pools: bool) -> list[str]:
    """Arguments of a run that has this placement; shell quoting is the caller's.

    Args:
        replaces_pools: the configuration names pools; they are deleted, since ``={}`` would leave them.
    """
    words = [f"trainer.v1.trainer_mode={MODES[plan.schedule]}"]
    if replaces_pools:
        words.append("~trainer.resource_pools")
    for pool in plan.pools:
        nodes, per_node = _processes(pool.devices, cluster.device.node)
        if ACTOR in pool.choices:
            words += [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={per_node}"]
        else:
            roles = list(pool.choices)
            processes = ", ".join([str(per_node)] * nodes)
            words.append(f"+trainer.resource_pools.{roles[0]}_pool={{roles: [{', '.join(roles)}], "
                         f"processes: [{processes}]}}")  # fmt: skip
        for role, choice in pool.choices.items():
            words += _of_sampler(choice, pool) if role == SAMPLER else _of_trainer(role, choice)
    return list(dict.fromkeys(words))


def _processes(devices: int, node: int) -> tuple[int, int]:
    return (1, devices) if devices <= node else (devices // node, node)


def _of_sampler(choice: RolePlan, pool: PoolPlan[RolePlan]) -> Iterator[str]:
    if sampler_costs(choice.engine).reserves:
        yield f"{_ROLLOUT}.tensor_model_parallel_size={choice.parallel.tensor}"
        yield f"{_ROLLOUT}.pipeline_model_parallel_size={choice.parallel.pipeline}"
        yield f"{_ROLLOUT}.gpu_memory_utilization={choice.memory_fraction:g}"
    if ACTOR not in pool.choices:
        yield f"{_ROLLOUT}.checkpoint_engine.backend=nccl"


def _of_trainer(role: str, choice: RolePlan) -> Iterator[str]:
    section = SECTIONS[role]
    grid = grid_of(choice.engine)
    fsdp = ".fsdp" if role == "critic" else ".fsdp_config"
    engine = section + {TENSOR: ".megatron", DATA_ONLY: ".torchtitan"}.get(grid, fsdp)
    if grid == TENSOR:
        yield f"{engine}.tensor_model_parallel_size={choice.parallel.tensor}"
        yield f"{engine}.pipeline_model_parallel_size={choice.parallel.pipeline}"
    elif grid == SEQUENCE:
        yield f"{section}.strategy={choice.engine}"
        yield f"{engine}.fsdp_size=-1"
        yield f"{engine}.offload_policy={_word(choice.offload_policy)}"
        yield f"{engine}.use_torch_compile={_word(choice.compiled)}"
        yield f"{engine}.ulysses_sequence_parallel_size={choice.parallel.sequence}"
    yield f"{engine}.param_offload={_word(choice.param_offload)}"
    if choice.trains:
        yield f"{engine}.optimizer_offload={_word(choice.optimizer_offload)}"
        if grid == TENSOR:
            granularity = "full" if choice.recompute else "null"
            yield f"{engine}.override_transformer_config.recompute_granularity={granularity}"
        else:
            yield f"{MODELS[role]}.enable_gradient_checkpointing={_word(choice.recompute)}"
        yield f"{section}.use_dynamic_bsz=true"
        yield f"{section}.ppo_max_token_len_per_gpu={choice.micro_tokens}"
    if role in ("actor", "ref"):
        place = _ROLLOUT if role == "actor" else section
        yield f"{place}.log_prob_use_dynamic_bsz=true"
        yield f"{place}.log_prob_max_token_len_per_gpu={choice.infer_tokens}"
    else:
        yield f"{section}.use_dynamic_bsz=true"
        yield f"{section}.forward_max_token_len_per_gpu={choice.infer_tokens}"


def _word(value: bool) -> str:
    return str(value).lower()

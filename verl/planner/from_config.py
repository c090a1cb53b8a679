"""Roles, layouts and work of a run, read from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from verl.config.machine.pools import starts_no_engine, trained_roles
from verl.config.machine.topology import Topology, added_roles
from verl.config.rules.megatron_fields import STAGES
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ConfigNode
from verl.config.schema.root import PPOTrainerConfig, skips_old_log_prob
from verl.errors import NotBuiltError
from verl.metrics import notice
from verl.planner.engines import automatic_tokens, trainer_costs
from verl.planner.layout import Lengths, Parallel, RolePlan, Workload
from verl.planner.shapes import ModelShape

COMPILED_FROM = 500_000_000
"""Parameters from which the plain engine compiles layers on a GPU (`verl.models.compiled`)."""
OVERLAPPING_MODES = ("one_step_off", "separate_async", "fully_async")
"""Schedules that generate while they train."""
MEAN_SHARE = 0.5
"""Mean length of prompts and responses as a share of the longest that the settings admit: an assumption."""
FLOAT32 = ("fp32", "float32", "float")
_PASSES = {
    "actor": ("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size"),
    "ref": ("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size"),
    "critic": ("use_dynamic_bsz", "forward_max_token_len_per_gpu", "forward_micro_batch_size"),
    "rm": ("use_dynamic_bsz", "forward_max_token_len_per_gpu", "micro_batch_size"),
}
"""Role -> its settings of a pass without gradients: a switch, tokens, rows (``..._per_gpu``)."""
MODELS = {"actor": "actor_rollout_ref.model", "ref": "actor_rollout_ref.model", "critic": "critic.model",
          "rm": "reward.reward_model"}  # fmt: skip
"""Role -> the section of its model."""
_UPDATES = ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size")


@dataclass(frozen=True)
class RunPlan:
    """What a run holds and does.

    Args:
        roles: in the order of its topology.
        shapes: role -> its model.
        work: of one step.
        overlaps: samplers of a pool of their own generate while the trainers compute.
        has_pools: the configuration names pools.
    """

    roles: tuple[RolePlan, ...]
    shapes: Mapping[str, ModelShape]
    work: Workload
    overlaps: bool = False
    has_pools: bool = False

    @property
    def devices(self) -> int:
        """Over all pools."""
        return sum({role.pool: role.devices for role in self.roles if role.devices}.values())


def run_plan(config: PPOTrainerConfig, on_cpu: bool, shape_of: Callable[[str, str], ModelShape]) -> RunPlan:
    """The plan of a checked configuration.

    Args:
        on_cpu: what ``auto`` means in dtypes and unset switches.
        shape_of: (path of a model, the setting that names it) -> its sizes: `verl.models.shape.model_shape`.

    Raises:
        NotBuiltError: a schedule adds a model that has no costs here.
        ModelError: a model has no config.json on this machine, or one that the planner cannot read.
    """
    added = added_roles(config)
    if added:
        raise NotBuiltError("the planner has no costs of a model that a schedule or a teacher adds",
                            key="trainer.v1.trainer_mode", got=added[0].name)  # fmt: skip
    topology, work = Topology.of(config), _work(config)
    plans: list[RolePlan] = []
    shapes: dict[str, ModelShape] = {}
    for name, _, section, fsdp in trained_roles(config):
        part, model = topology.part(name), _model(config, name)
        field = "path" if "path" in model else "model_path"
        shape = shape_of(str(model[field]), f"{MODELS[name]}.{field}")
        if name in ("critic", "rm"):
            shape = shape.with_scalar_head()
        sizes = part.sizes
        plan = RolePlan(
            role=name,
            engine=part.backend,
            pool=part.pool,
            devices=topology.pool(part.pool).size,
            parallel=Parallel(sizes.tensor, sizes.pipeline, sizes.data, sizes.expert, sizes.sequence),
            trains=name in ("actor", "critic"),
            infers=name != "actor" or not skips_old_log_prob(config),
            shares_prompts=_shares_prompts(config, name, part.backend),
            scalar_head=name in ("critic", "rm"),
            on_cpu=on_cpu,
        )
        plan = _with_model(plan, model, on_cpu)
        plan = _with_engine(plan, section, fsdp, shape, on_cpu)
        plans.append(_with_batches(plan, config, section, shape, work))
        shapes[name] = shape
    if not starts_no_engine(config.actor_rollout_ref.rollout):
        plans.insert(1, _sampler(config, topology, on_cpu))
        shapes["rollout"] = shapes["actor"]
    pools = {plan.role: plan.pool for plan in plans}
    overlaps = config.trainer.v1.trainer_mode in OVERLAPPING_MODES and pools.get("rollout") != pools["actor"]
    return RunPlan(tuple(plans), shapes, work, overlaps, bool(config.trainer.resource_pools))


def _work(config: PPOTrainerConfig) -> Workload:
    data, trainer = config.data, config.trainer
    prompt, response = data.max_prompt_length, data.max_response_length
    return Workload(
        prompts=data.train_batch_size,
        samples=config.actor_rollout_ref.rollout.n,
        prompt=Lengths(MEAN_SHARE * prompt, prompt),
        response=Lengths(MEAN_SHARE * response, response),
        steps=trainer.total_training_steps,
    )


def _model(config: PPOTrainerConfig, role: str) -> ConfigNode:
    sections: dict[str, ConfigNode] = {"critic": config.critic.model, "rm": config.reward.reward_model}
    return sections.get(role, config.actor_rollout_ref.model)


def _shares_prompts(config: PPOTrainerConfig, role: str, engine: str) -> bool:
    """Megatron-Core's rows share none; the setting is of the actor and its reference, other roles do."""
    shares = role not in ("actor", "ref") or config.actor_rollout_ref.actor.use_prefix_grouper
    packs = _model(config, role)["use_remove_padding"]
    return shares and packs and not trainer_costs(engine).optimizer_over_data


def _bytes(dtype: str, on_cpu: bool) -> int:
    name = dtype.removeprefix("torch.")
    return 4 if name in FLOAT32 or (name == "auto" and on_cpu) else 2


def _with_model(plan: RolePlan, model: ConfigNode, on_cpu: bool) -> RolePlan:
    if not isinstance(model, HFModelConfig):
        return plan
    recompute, fuses_head = model.enable_gradient_checkpointing, trainer_costs(plan.engine).fuses_head
    return replace(
        plan,
        recompute=plan.trains and (not on_cpu if recompute is None else recompute),
        activation_offload=fuses_head and plan.trains and model.enable_activation_offload and not on_cpu,
        fused_head=model.fused_kernel_options.impl_backend if fuses_head and model.use_fused_kernels else "",
        lora_rank=model.lora_rank if plan.trains else 0,
    )


def _with_engine(plan: RolePlan, section: ConfigNode, fsdp: str, shape: ModelShape, on_cpu: bool) -> RolePlan:
    """Offloading, dtypes and shards from the section of the backend."""
    engine = section[plan.engine if plan.engine in section else fsdp]
    plan = replace(
        plan,
        param_offload=engine.param_offload and not on_cpu,
        optimizer_offload=engine.optimizer_offload and not on_cpu,
        compute_bytes=_bytes(engine.dtype, on_cpu) if "dtype" in engine else 2,
        keeps_gathered="reshard_after_forward" in engine and engine.reshard_after_forward in (False, "never"),
        optimizer=section["optim"].optimizer if plan.trains else "AdamW",
    )
    if "override_transformer_config" in engine:
        granularity = engine.override_transformer_config.recompute_granularity
        parallel = replace(plan.parallel, expert_tensor=engine.expert_tensor_parallel_size or 0)
        typed = [name for name in STAGES if engine.override_mcore_model_config.get(name)]
        if typed:
            notice(f"the plan of {plan.role}", f"pipeline stages of equal length are assumed; {typed[0]} is not read")
        return replace(plan, parallel=parallel, recompute=plan.trains and granularity == "full")
    if "fsdp_size" not in engine:
        return replace(plan, shards=plan.devices)
    size = engine.fsdp_size if 0 < engine.fsdp_size < plan.devices else plan.devices
    large = not on_cpu and shape.parameters >= COMPILED_FROM and plan.engine == "plain"
    compiles = engine.use_torch_compile
    return replace(
        plan,
        shards=1 if plan.engine == "plain" else size,
        weight_bytes=_bytes(engine.model_dtype, on_cpu=True),
        offload_policy=engine.offload_policy and trainer_costs(plan.engine).offloads and not on_cpu,
        full_gradients=engine.use_no_sync_for_gradient_accumulation,
        compiled=large if compiles is None else compiles,
    )


def _with_batches(
    plan: RolePlan, config: PPOTrainerConfig, section: ConfigNode, shape: ModelShape, work: Workload
) -> RolePlan:
    """Tokens of a micro-batch: as they are set, by rows of the longest length, or the engine's own budget."""
    logits = 0 if plan.fused_head or plan.scalar_head else shape.vocabulary
    kind = "cpu" if plan.on_cpu else "cuda"
    automatic = automatic_tokens(logits, kind, work.longest, shape.parameters)

    def tokens(node: ConfigNode, names: tuple[str, str, str]) -> int:
        switch, budget, rows = names
        if switch in node and node[switch] and budget in node:
            return int(node[budget])
        per_process = node[f"{rows}_per_gpu"]
        if per_process is None and rows in node and node[rows] is not None:  # the older one counts over data ranks
            per_process = max(1, node[rows] // plan.parallel.data)
        return automatic if per_process is None else per_process * work.longest // plan.parallel.sequence

    passes = config.actor_rollout_ref.rollout if plan.role == "actor" else section
    plan = replace(plan, infer_tokens=tokens(passes, _PASSES[plan.role]), infer_entropy=plan.role == "actor")
    if not plan.trains:
        return plan
    actor = config.actor_rollout_ref.actor
    return replace(
        plan,
        micro_tokens=tokens(section, _UPDATES),
        mini_batches=max(1, work.prompts // section["ppo_mini_batch_size"]),
        epochs=section["ppo_epochs"],
        async_save=section["checkpoint"].async_save,
        entropy=plan.role == "actor" and (actor.entropy_coeff != 0 or actor.calculate_entropy),
        freeze_vision=plan.role == "actor" and actor.freeze_vision_tower,
    )


def _sampler(config: PPOTrainerConfig, topology: Topology, on_cpu: bool) -> RolePlan:
    rollout, spec, pool = config.actor_rollout_ref.rollout, topology.spec, topology.pool_of("rollout")
    sleeps = rollout.free_cache_engine
    return RolePlan(
        role="rollout",
        engine=rollout.name,
        pool=pool.name,
        devices=pool.size,
        parallel=Parallel(spec.tensor, spec.pipeline, max(1, len(topology.replicas)), spec.expert),
        compute_bytes=_bytes(rollout.dtype, on_cpu),
        cache_bytes=_bytes(rollout.dtype, on_cpu),
        memory_fraction=rollout.gpu_memory_utilization,
        batch_rows=rollout.max_num_seqs,
        sleeps=not on_cpu if sleeps is None else sleeps,
        bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
        on_cpu=on_cpu,
    )

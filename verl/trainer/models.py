"""The models of a run: which sections of the configuration each is built from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from verl.algorithms.distillation import DistilledPolicyLoss
from verl.algorithms.losses import LossFn, PPOPolicyLoss, PPOValueLoss
from verl.config import HFModelConfig, PPOTrainerConfig, replace
from verl.config.machine.topology import added_roles
from verl.config.schema.algorithm import TOP_K_KINDS
from verl.config.schema.node import Node, key_of
from verl.config.schema.root import Teacher, teachers_of
from verl.single_controller.base import Role
from verl.workers.model import ModelRole
from verl.workers.part import PassLimits

POLICY_KEY = "actor_rollout_ref.model.path"
RM = str(Role.RewardModel)


def model_roles(config: PPOTrainerConfig) -> dict[str, ModelRole]:
    """The models that a run may hold, by their roles: the library's own, and those that its schedule adds."""
    roles = [make(config) for make in (actor, reference, critic, frozen_reward_model)]
    added = [teacher(config, role) if isinstance(role, Teacher) else role for role in added_roles(config)]
    return {role.name: role for role in [*roles, *added]}


def actor(config: PPOTrainerConfig) -> ModelRole:
    """The policy that is trained."""
    policy = config.actor_rollout_ref
    c, rollout = policy.actor, policy.rollout
    return ModelRole(
        name="actor",
        model=policy.model,
        key=POLICY_KEY,
        strategy=c.strategy,
        fsdp=c.fsdp_config,
        megatron=c.megatron,
        torchtitan=c.torchtitan,
        limits=limits(rollout, "log_prob_", dynamic="log_prob_use_dynamic_bsz"),
        train_limits=limits(c, "ppo_"),
        temperature=rollout.temperature,
        optim=c.optim,
        loss=partial(policy_objective, config),
        grad_clip=c.grad_clip,
        mini_batch_size=c.ppo_mini_batch_size,
        epochs=c.ppo_epochs,
        shuffle=c.shuffle,
        shuffle_seed=c.data_loader_seed,
        rows_per_step=c.ppo_mini_batch_size * c.rollout_n,
        share_prompts=c.use_prefix_grouper,
        router_replay=c.router_replay.mode,
        freeze_vision_tower=c.freeze_vision_tower,
        has_tokenizer=True,
        profiler=c.profiler,
    )


def policy_objective(config: PPOTrainerConfig) -> LossFn:
    """What the actor minimises: the policy loss, with that of distillation where there are teachers."""
    c, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    task = PPOPolicyLoss(c, rollout.response_length, c.use_rollout_log_probs)
    if not config.distillation.enabled:
        return task
    return DistilledPolicyLoss(task, config.distillation.distillation_loss)


def reference(config: PPOTrainerConfig) -> ModelRole:
    """The model that the policy started from, without an adapter."""
    policy = config.actor_rollout_ref
    c = policy.ref
    return ModelRole(
        name="ref",
        model=replace(policy.model, lora_rank=0, lora_adapter_path=None),
        key=POLICY_KEY,
        strategy=c.strategy,
        fsdp=c.fsdp_config,
        megatron=c.megatron,
        torchtitan=c.torchtitan,
        limits=limits(c, "log_prob_", dynamic="log_prob_use_dynamic_bsz"),
        temperature=policy.rollout.temperature,
        share_prompts=policy.actor.use_prefix_grouper,
        router_replay=c.router_replay.mode,
        reference_of="actor",
        has_tokenizer=True,
        profiler=c.profiler,
    )


def teacher(config: PPOTrainerConfig, described: Teacher) -> ModelRole:
    """A frozen model that scores samples of the policy; it runs as the reference policy does."""
    like, loss = reference(config), config.distillation.distillation_loss
    return dataclasses.replace(
        like,
        name=described.name,
        model=teacher_model(like.model, described.path),
        key=described.setting,
        pool=described.pool,
        router_replay="disabled",
        reference_of="",
        has_tokenizer=False,
        top_k=loss.topk if loss.loss_mode in TOP_K_KINDS else 0,
    )


def served_models(config: PPOTrainerConfig) -> dict[str, HFModelConfig]:
    """Of the teachers behind servers, by their names."""
    student = reference(config).model
    return {one.name: teacher_model(student, one.path) for one in teachers_of(config) if one.is_served}


def teacher_model(student: HFModelConfig, path: str) -> HFModelConfig:
    """The section of a frozen model at ``path`` that runs as the student does."""
    runs_by = {name: value for name, value in student.override_config.items() if name == "attn_implementation"}
    return replace(
        student,
        path=path,
        tokenizer_path=None,
        hf_config_path=None,
        lora_rank=0,
        lora_adapter_path=None,
        lora_base_quantization=None,
        override_config=runs_by,
    )


def critic(config: PPOTrainerConfig) -> ModelRole:
    """The value model: a trunk with a scalar head."""
    c = config.critic
    return ModelRole(
        name="critic",
        model=c.model,
        key="critic.model.path",
        strategy=c.strategy,
        fsdp=c.fsdp,
        megatron=c.megatron,
        limits=limits(c, "forward_"),
        train_limits=limits(c, "ppo_"),
        kind="value",
        optim=c.optim,
        loss=partial(PPOValueLoss, c, response_length=config.data.max_response_length),
        grad_clip=c.grad_clip,
        mini_batch_size=c.ppo_mini_batch_size,
        epochs=c.ppo_epochs,
        shuffle=c.shuffle,
        shuffle_seed=c.data_loader_seed,
        rows_per_step=c.ppo_mini_batch_size * c.rollout_n,
        profiler=c.profiler,
    )


def frozen_reward_model(config: PPOTrainerConfig) -> ModelRole:
    """The frozen model whose scalar head scores responses."""
    c = config.reward.reward_model
    return ModelRole(
        name=RM,
        model=HFModelConfig(
            path=str(c.model_path),
            trust_remote_code=c.trust_remote_code,
            external_lib=c.external_lib,
            override_config=c.override_config,
            use_shm=c.use_shm,
            use_remove_padding=c.use_remove_padding,
        ),
        key="reward.reward_model.model_path",
        strategy=c.strategy,
        fsdp=c.fsdp_config,
        megatron=c.megatron,
        limits=limits(c, tokens="forward_max_token_len_per_gpu"),
        kind="value",
        role_kind="scorer",
    )


def limits(
    section: Node, prefix: str = "", dynamic: str = "use_dynamic_bsz", tokens: str | None = None
) -> Callable[[int], PassLimits]:
    """The number of ranks -> limits of one pass, from settings that roles have under different names.

    Args:
        section: that holds the settings.
        prefix: of their names.
        dynamic: the switch for the budget of tokens.
        tokens: that budget, where it has another prefix.
    """
    rows, tokens = f"{prefix}micro_batch_size_per_gpu", tokens or f"{prefix}max_token_len_per_gpu"
    keys = (key_of(section, rows), key_of(section, tokens))
    total = section[f"{prefix}micro_batch_size"]
    return partial(PassLimits.of, section[rows], total, section[dynamic], section[tokens], keys=keys)

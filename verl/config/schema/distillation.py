"""Settings of on-policy distillation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.schema.node import ConfigNode, section, setting
from verl.config.schema.tree import AMOUNT, COUNT, POSITIVE, NameBound, ValueBound

TEACHER_POOL = "teacher_pool"
TEACHER_FIELDS = ("key", "model_path", "num_replicas", "inference")
"""What upstream's tree has of a teacher; the last two are settings of a server that samples, and have no effect."""


TOP_K_MODES = ("forward_kl_topk", "reverse_kl_topk")
"""Values of loss_mode that read several tokens per position."""
_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
LOSS_MODES = (*_ESTIMATORS, *(f"{name}+" for name in _ESTIMATORS), *TOP_K_MODES)
_TOP_K, _GRADIENT = ".loss_mode=forward_kl_topk or reverse_kl_topk", ".use_policy_gradient=true"


@dataclass(frozen=True)
class DistillationLossConfig(ConfigNode):
    """What the student learns of its teachers."""

    loss_mode: str = setting(
        "k3",
        "divergence of each token: an estimator of kl_loss_type; forward_kl_topk, reverse_kl_topk: over the teacher's "
        "topk most likely tokens",
        within=NameBound(LOSS_MODES),
    )
    topk: int = setting(
        32, "tokens per position; the size of the vocabulary makes the KL exact", within=COUNT, needs=_TOP_K
    )
    use_task_rewards: bool = setting(True, "add the policy loss on rewards; false: learn from the teacher alone")
    distillation_loss_coef: float = setting(1.0, "weight of the distillation loss", within=POSITIVE)
    loss_max_clamp: float | None = setting(
        None, "bound of each token's absolute divergence; null: none", within=POSITIVE
    )
    log_prob_min_clamp: float | None = setting(
        None, "lower bound of both log-probs; null: none", within=ValueBound("below 0", lambda value: value < 0)
    )
    use_policy_gradient: bool = setting(False, "take the negative divergence of each token as its advantage")
    policy_loss_mode: str = setting("vanilla", "policy loss with use_policy_gradient", needs=_GRADIENT)
    clip_ratio: float = setting(0.2, "clip range of that policy loss", within=AMOUNT, needs=_GRADIENT)
    clip_ratio_low: float | None = setting(0.2, "its lower clip range", within=AMOUNT, needs=_GRADIENT)
    clip_ratio_high: float | None = setting(0.2, "its upper clip range", within=AMOUNT, needs=_GRADIENT)


@dataclass(frozen=True)
class DistillationConfig(ConfigNode):
    """Frozen teachers that score the policy's samples; they run as actor_rollout_ref.ref says."""

    enabled: bool = setting(False, "learn from teachers on the samples of the policy")
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig, needs="..enabled=true")
    n_gpus_per_node: int = setting(8, "processes per node of a pool for the teachers", within=COUNT, needs=".nnodes")
    nnodes: int = setting(0, "nodes of that pool; 0: teachers share the trainers' processes", within=AMOUNT)
    teacher_models: dict = setting(
        {}, "by name: {math: {model_path: FOLDER, key: gsm8k}}; without a key: all rows that no other serves"
    )
    teacher_key: str = setting("data_source", "column of the data that picks a row's teacher by its key")


@dataclass(frozen=True)
class Teacher:
    """A frozen model that scores some of the rows, as a role of the run.

    Args:
        name: of the role.
        path: of the model.
        setting: the key of ``path``, for messages.
        serves: value of ``distillation.teacher_key`` in its rows; None: all rows that no other serves.
        pool: in which its role is placed, as ``trainer.resource_pools`` names it.
        strategy, fsdp, megatron, torchtitan: as the reference policy has them.
    """

    name: str
    path: str
    setting: str
    serves: str | None
    strategy: str
    fsdp: Any
    megatron: Any
    torchtitan: Any = None
    pool: str = "teacher"


def teachers_of(cfg: Any) -> Iterator[Teacher]:
    """The teachers of a run whose settings `verl.config.rules.distillation` accepts."""
    ref = cfg.actor_rollout_ref.ref
    for name, described in (cfg.distillation.teacher_models if cfg.distillation.enabled else {}).items():
        if isinstance(described, Mapping) and described.get("model_path"):
            key, serves = f"distillation.teacher_models.{name}.model_path", described.get("key")
            role = str(name) if str(name).startswith("teacher_") else f"teacher_{name}"
            engine = (ref.strategy, ref.fsdp_config, ref.megatron, ref.torchtitan)
            yield Teacher(role, str(described["model_path"]), key, None if serves is None else str(serves), *engine)

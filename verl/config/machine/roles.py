"""The models of a run on training engines: where each runs, on how many processes, by which settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl import env
from verl.config.machine.pools import Pools
from verl.config.machine.topology import trained_roles
from verl.config.schema.distillation import teachers_of
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ConfigNode, replace
from verl.config.schema.root import PPOTrainerConfig, uses_reference
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.config.schema.sft import SFTTrainerConfig

_MODEL, _REF, _TEACHERS = "actor_rollout_ref.model", "actor_rollout_ref.ref", "distillation.teacher_models"


@dataclass(frozen=True)
class ModelRole:
    """One model of a run.

    Args:
        key: its section; ``<key>.strategy`` names its backend.
        section: its settings there.
        others: key and section of the backend that shards by FSDP.
        path: folder or hub name of the model.
        pool, processes: where it runs, and on how many processes.
        started: what says how many these are.
        adapter: the setting that puts a LoRA adapter on the model; None where there is none.
        model_key, model: key and section of the model's own settings.
    """

    key: str
    section: Any
    others: tuple[str, ConfigNode]
    path: str | None
    pool: str
    processes: int
    started: str = "trainer.n_gpus_per_node x trainer.nnodes"
    adapter: str | None = None
    model_key: str = _MODEL
    model: Any = None

    @property
    def is_megatron(self) -> bool:
        return self.section.strategy == "megatron"

    @property
    def has_own_sizes(self) -> bool:
        """Whether a section of its own, and not that of FSDP, says how the model is shared."""
        return self.section.strategy in ("megatron", "torchtitan")

    @property
    def sizes(self) -> Any:
        return self.section.megatron

    def of(self, name: str) -> str:
        return f"{self.key}.megatron.{name}"


def roles(cfg: PPOTrainerConfig) -> Iterator[ModelRole]:
    """The models that a run holds on a training backend."""
    policy, model, pools = cfg.actor_rollout_ref, cfg.reward.reward_model, Pools.of(cfg)
    held = {
        "actor": (policy.model.path, _adapter(_MODEL, policy.model), _MODEL, policy.model),
        "ref": (policy.model.path, None, _MODEL, policy.model),
        "critic": (cfg.critic.model.path, _adapter("critic.model", cfg.critic.model), "critic.model", cfg.critic.model),
        "rm": (model.model_path, None, "reward.reward_model", model),
    }
    for teacher in teachers_of(cfg):  # first: what is keyed by the section is of the reference policy, if there is one
        pool, ref = pools.of_role(teacher.pool), policy.ref
        if not (uses_reference(cfg) and pool == pools.of_role("ref")):
            of_fsdp = (f"{_REF}.fsdp_config", ref.fsdp_config)
            bare = replace(policy.model, lora_rank=0, lora_adapter_path=None, lora_base_quantization=None)
            yield ModelRole(_REF, ref, of_fsdp, teacher.path, pool.name, pool.size, model_key=_TEACHERS, model=bare)
    for name, key, section, fsdp in trained_roles(cfg):
        pool, (path, adapter, model_key, settings) = pools.of_role(name), held[name]
        others = (f"{key}.{fsdp}", section[fsdp])
        yield ModelRole(
            key, section, others, path, pool.name, pool.size, adapter=adapter, model_key=model_key, model=settings
        )


def role_of_supervised(cfg: SFTTrainerConfig) -> ModelRole:
    """The one model of a supervised run."""
    started = "what torchrun starts (--nproc_per_node)"
    others, world = ("engine", cfg.engine), env.get_int("WORLD_SIZE", 1)
    adapter = _adapter("model", cfg.model)
    return ModelRole("engine", cfg.engine, others, cfg.model.path, "", world, started, adapter, "model", cfg.model)


def _adapter(key: str, model: HFModelConfig) -> str | None:
    return next((f"{key}.{name}" for name in ("lora_rank", "lora_adapter_path") if model[name]), None)


def refuse_without_cuda(on_megatron: Iterable[ModelRole], device: str, external_lib: str | None) -> None:
    """Raise `ConfigError` for a role on Megatron-Core where nothing answers its CUDA calls.

    Args:
        device: of the workers.
        external_lib: a module of the person's own, which may answer them.
    """
    for role in on_megatron:
        if role.is_megatron and device != "cuda" and not external_lib:
            raise ConfigError(
                f"Megatron-Core calls CUDA, and this run is on {device}",
                key=f"{role.key}.strategy",
                got="megatron",
                allowed=f"plain (one process), fsdp or fsdp2 on {device}",
                fix="Leave it out, or run on a machine with CUDA. A module that answers these calls instead goes into "
                "external_lib of the model.",
            )

"""The worker of a model that a recipe adds to a run: it builds what a `ModelRole` says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl.algorithms.losses import LossFn
from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.config.megatron import MegatronEngineConfig
from verl.single_controller.base import Dispatch, register
from verl.workers.part import Limits, ModelPart, Site, layout, local_model, make_engine, schedule_steps, seat_of
from verl.workers.training import TrainingWorker


@dataclass(frozen=True)
class ModelRole:
    """A language model beside the library's roles: what its worker builds, and how the dataflow calls it.

    Args:
        name: of the role; its metrics and its folder in a checkpoint bear it.
        model: the section that is loaded.
        key: the setting that names the model, for messages.
        strategy: training backend; ``auto`` is settled where the size of the pool is known.
        fsdp, megatron: how the backend holds it.
        limits: the number of ranks -> rows or tokens of one pass.
        temperature: logits are divided by it before every softmax.
        optim: None for a frozen model.
        loss_fn: what training minimises.
        grad_clip: largest norm of its gradient.
        mini_batch_size: prompts per optimizer step, over all ranks.
        pool: the role's name in ``trainer.resource_pools``.
    """

    name: str
    model: HFModelConfig
    key: str
    strategy: str
    fsdp: FSDPEngineConfig
    megatron: MegatronEngineConfig
    limits: Callable[[int], Limits]
    temperature: float = 1.0
    optim: OptimizerConfig | None = None
    loss_fn: LossFn | None = None
    grad_clip: float = 1.0
    mini_batch_size: int = 0
    pool: str = ""


class ModelWorker(TrainingWorker):
    """A causal language model that infers and, with an optimizer, trains."""

    def __init__(self, role: ModelRole, site: Site | None = None):
        super().__init__()
        self.role, self.site = role, site or Site()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model, and make the optimizer where it has one."""
        role, site = self.role, self.site
        engine = make_engine(
            site.strategy,
            self.info,
            model=local_model(role.model, role.key),
            optim=role.optim,
            kind="causal_lm",
            grad_clip=role.grad_clip,
            total_training_steps=site.total_training_steps if role.optim is None else schedule_steps(role.optim, site),
            device=site.device,
            seed=site.seed,
            **layout(site.strategy, role.model, role.fsdp, role.megatron, share_prompts=True),
        )
        self.part = ModelPart(
            engine,
            train_limits=role.limits(seat_of(self, engine).size),
            loss_fn=role.loss_fn,
            temperature=role.temperature,
        )

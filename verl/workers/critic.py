"""The critic: a value model with PPO's clipped value loss."""

from __future__ import annotations

from verl.algorithms.losses import PPOValueLoss
from verl.config import CriticConfig, ProfilerConfig
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.single_controller.base import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
)
from verl.workers.part import (
    Limits,
    ModelPart,
    Site,
    layout,
    local_model,
    make_engine,
    meshes_of,
    schedule_steps,
    seat_of,
)
from verl.workers.profiling import profiled
from verl.workers.training import TrainingWorker


class CriticWorker(TrainingWorker):
    """Values before each response token, and their regression on the returns."""

    def __init__(self, config: CriticConfig, site: Site | None = None):
        super().__init__()
        self.config, self.site = config, site or Site()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the trunk, add a scalar head, make the optimizer."""
        c = self.config
        engine = make_engine(
            self.site.strategy,
            self.info,
            model=local_model(c.model, "critic.model.path"),
            optim=c.optim,
            kind="value",
            grad_clip=c.grad_clip,
            total_training_steps=schedule_steps(c.optim, self.site),
            device=self.site.device,
            seed=self.site.seed,
            **layout(self.site.strategy, c.model, c.fsdp, c.megatron, share_prompts=True),
        )
        ranks = seat_of(self, engine).size
        self.part = ModelPart(
            engine,
            train_limits=Limits.of(
                c.ppo_micro_batch_size_per_gpu,
                c.ppo_micro_batch_size,
                c.use_dynamic_bsz,
                c.ppo_max_token_len_per_gpu,
                ranks,
            ),
            infer_limits=Limits.of(
                c.forward_micro_batch_size_per_gpu,
                c.forward_micro_batch_size,
                c.use_dynamic_bsz,
                c.forward_max_token_len_per_gpu,
                ranks,
            ),
            loss_fn=PPOValueLoss(c, response_length=self.site.response_length),
            mini_batch_rows=max(1, c.ppo_mini_batch_size * c.rollout_n // ranks),
        )

    def profiler_configs(self) -> dict[str, ProfilerConfig]:
        return {"critic": self.config.profiler}

    def meshes(self) -> dict[str, tuple[int, bool]]:
        return {**meshes_of(self, critic=getattr(self, "part", None)), **super().meshes()}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    @profiled("critic")
    def compute_values(self, data: DataProto) -> DataProto:
        """``values`` (B, T): V of the state before each response token."""
        return DataProto.from_dict(tensors=self.part.infer(data, ("values",)))

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn(mesh_name="critic"))
    @profiled("critic")
    def update_critic(self, data: DataProto) -> MetricSet:
        """One optimizer step per mini-batch of ``data``, which holds ``values`` and ``returns``."""
        return self.part.train(data)

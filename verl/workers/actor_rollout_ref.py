"""The policy's model and its reference under upstream's method names, for users' own classes.

The loop calls `infer` and `train`, which call these names, so that overrides take effect.
"""

from __future__ import annotations

from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.single_controller.base import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
)
from verl.workers.model import ModelWorker
from verl.workers.options import InferOptions, TrainOptions
from verl.workers.sending import SyncResult


class ActorRolloutRefWorker(ModelWorker):
    """The actor or its reference, by its role; the colocated sampler is a `SamplingWorker`."""

    def meshes(self) -> dict[str, tuple[int, bool]]:
        rollout = self.fused_worker_dict.get("rollout")
        return super().meshes() if rollout is None else {**rollout.meshes(), **super().meshes()}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """As `SamplingWorker.generate_sequences` of this process."""
        return self.colocated("rollout").generate_sequences(prompts) if self.rank == 0 else prompts[:0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def publish(self, version: int, sent: SyncResult) -> None:
        """As `SamplingWorker.publish` of this process."""
        self.colocated("rollout").publish(version, sent)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def probe(self, version: int) -> DataProto:
        """As `SamplingWorker.probe` of this process."""
        return self.colocated("rollout").probe(version)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="model"))
    def infer(self, batch: DataProto, options: InferOptions) -> DataProto:
        with self.with_options(options):
            if self.role.reference_of:
                return self.compute_ref_log_prob(batch).rename("ref_log_prob", "log_probs")
            result = self.compute_log_prob(batch).rename("old_log_probs", "log_probs")
        return result.rename("entropys", "entropy") if "entropys" in result.tensors.keys() else result

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn(mesh_name="model"))
    def train(self, batch: DataProto, options: TrainOptions) -> MetricSet:
        with self.with_options(options):
            return self.update_actor(batch)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` (B, T), ``entropys`` if the loop asks for them, and its other outputs."""
        result = super().infer(data, self.options_of(InferOptions)).rename("log_probs", "old_log_probs")
        return result.rename("entropy", "entropys") if "entropy" in result.tensors.keys() else result

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` (B, T) of the reference policy."""
        return super().infer(data, InferOptions()).rename("log_probs", "ref_log_prob")

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: DataProto) -> MetricSet:
        """One optimizer step per mini-batch of ``data``, which holds ``advantages``."""
        return super().train(data, self.options_of(TrainOptions))

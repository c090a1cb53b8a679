"""The critic under upstream's method names, for users' own classes."""

from __future__ import annotations

from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.single_controller.base import (
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
)
from verl.workers.model import ModelWorker
from verl.workers.options import InferOptions, TrainOptions


class CriticWorker(ModelWorker):
    """Values before each response token, and their regression on the returns."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="model"))
    def infer(self, batch: DataProto, options: InferOptions) -> DataProto:
        return self.compute_values(batch)

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn(mesh_name="model"))
    def train(self, batch: DataProto, options: TrainOptions) -> MetricSet:
        with self.with_options(options):
            return self.update_critic(batch)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="critic"))
    def compute_values(self, data: DataProto) -> DataProto:
        """``values`` (B, T): V of the state before each response token."""
        return super().infer(data, InferOptions(("values",)))

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn(mesh_name="critic"))
    def update_critic(self, data: DataProto) -> MetricSet:
        """One optimizer step per mini-batch of ``data``, which holds ``values`` and ``returns``."""
        return super().train(data, self.options_of(TrainOptions))

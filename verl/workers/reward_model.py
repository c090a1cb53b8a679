"""A discriminative reward model: one scalar per response, read after its last token."""

from __future__ import annotations

import torch

from verl.config import FSDPEngineConfig, HFModelConfig
from verl.protocol import DataProto
from verl.single_controller.base import Dispatch, Worker, register
from verl.workers.part import Limits, ModelPart, Site, local_model, make_engine


class RewardModelWorker(Worker):
    """Scores responses with a scalar head on a language-model trunk.

    Args:
        model: the reward model; a classification checkpoint with one label brings its own head.
        engine: how it is held.
        limits: rows or tokens of one forward pass.
        site: device, training backend and seed.
    """

    def __init__(
        self,
        model: HFModelConfig,
        engine: FSDPEngineConfig | None = None,
        limits: Limits | None = None,
        site: Site | None = None,
    ):
        super().__init__()
        self.model_config, self.engine_config = model, engine or FSDPEngineConfig()
        self.limits, self.site = limits or Limits(), site or Site()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the reward model, frozen."""
        engine = make_engine(
            self.site.strategy,
            self.info,
            model=local_model(self.model_config, "reward.reward_model.model_path"),
            engine=self.engine_config,
            optim=None,
            kind="value",
            device=self.site.device,
            seed=self.site.seed,
        )
        self.part = ModelPart(engine, infer_limits=self.limits)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """``rm_scores`` (B, T): the model's scalar on the last response token, 0 elsewhere."""
        mask = data.tensors["response_mask"]
        values = self.part.infer(with_end_column(data), ("values",))["values"]
        scores = torch.zeros_like(mask, dtype=torch.float32)
        rows = mask.bool().any(-1)
        last = last_positions(mask)[rows]
        scores[rows, last] = values[rows, last + 1]
        return DataProto.from_dict(tensors={"rm_scores": scores})


def last_positions(mask: torch.Tensor) -> torch.Tensor:
    """Index of the last 1 of each row (B, T); 0 for a row without one."""
    return (mask * torch.arange(1, mask.shape[-1] + 1)).argmax(-1)


def with_end_column(data: DataProto) -> DataProto:
    """The batch with one more response column, in which only the token after each response is asked for.

    A value is that of the state BEFORE its token, so the state after the whole response is the value of the token that
    would follow; which id stands there makes no difference.
    """
    tensors, mask = data.tensors, data.tensors["response_mask"]
    wide = mask.shape[-1] + 1
    one_more = torch.zeros(len(mask), 1, dtype=mask.dtype)
    rows = mask.bool().any(-1)
    asked = torch.zeros(len(mask), wide, dtype=mask.dtype)
    asked[rows, last_positions(mask)[rows] + 1] = 1
    attention = torch.cat([tensors["attention_mask"], one_more], dim=1)
    attention[:, -wide:] |= asked
    ids = torch.cat([tensors["input_ids"], one_more], dim=1)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, -wide:],
            "response_mask": asked,
        }
    )

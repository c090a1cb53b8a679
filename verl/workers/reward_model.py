"""A discriminative reward model: one scalar per response, read after its last token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.config import HFModelConfig
from verl.config.rules.reward_model import headless
from verl.data import hf_tokenizer, processor_of
from verl.data.rewriting import Rewriter, same_encoding
from verl.engines.seen_rows import COLUMN as PICTURES
from verl.errors import ModelError
from verl.metrics import notice
from verl.protocol import DataProto
from verl.single_controller.base import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.model import ModelRole, ModelWorker
from verl.workers.part import WorkerContext, local_model

MODEL_KEY = "reward.reward_model.model_path"
TRUNCATED = "rm_truncated"
"""Column (B,) bool of a rewritten batch: the beginning of the conversation was cut off."""


class RewardModelWorker(ModelWorker):
    """Scores responses with a scalar head on a language-model trunk.

    Args:
        role: the reward model; a classification checkpoint with one label brings its own head.
        context: device and seed.
        policy: the model section in whose tokens the samples are written, None for the reward model's own. Where the
            two tokenizers differ, conversations are re-templated with the reward model's chat template.
        max_length: longest re-templated conversation, in tokens; a longer one loses its beginning.
    """

    def __init__(
        self,
        role: ModelRole,
        context: WorkerContext | None = None,
        policy: HFModelConfig | None = None,
        max_length: int | None = None,
    ):
        super().__init__(role, context)
        self.policy, self.max_length = policy, max_length

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the reward model, frozen."""
        model = local_model(self.role.model, MODEL_KEY)
        for problem in headless(model.path):
            raise problem
        self.rewriter = self._make_rewriter(model)
        super().init_model()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rm"))
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """``rm_scores`` (B, T): the model's scalar on the last response token, 0 elsewhere; NaN where it has none.

        Where conversations are re-templated, also the column ``rm_truncated``.
        """
        mask = data.tensors["response_mask"]
        columns: dict[str, Any] = {}
        if self.rewriter is None:
            values = self._scores(data)
        else:
            rewritten = self.rewriter.rewrite(data)
            values, columns[TRUNCATED] = self._scores(rewritten.batch), rewritten.cut
            for row, error in rewritten.refused.items():
                notice("reward.reward_model", f"a conversation cannot be written for the reward model: {error}")
                values[row] = float("nan")
        scores = torch.zeros_like(mask, dtype=torch.float32)
        rows = mask.bool().any(-1)
        scores[rows, last_positions(mask)[rows]] = values[rows]
        return DataProto.from_dict(tensors={"rm_scores": scores}, non_tensors=columns)

    def _scores(self, data: DataProto) -> Tensor:
        """(B,) the state behind each row's last response token; 0 for a row without one."""
        mask = data.tensors["response_mask"]
        values = self.part.infer(with_end_column(data), ("values",))["values"]
        rows = mask.bool().any(-1)
        scores = torch.zeros(len(mask), dtype=torch.float32)
        scores[rows] = values[rows, last_positions(mask)[rows] + 1]
        return scores

    def _make_rewriter(self, model: HFModelConfig) -> Rewriter | None:
        if self.policy is None:
            return None
        source = _tokenizer(local_model(self.policy, "actor_rollout_ref.model.path"), "actor_rollout_ref.model.path")
        try:
            target = _tokenizer(model, MODEL_KEY)
        except ModelError as error:
            message = f"its tokenizer cannot be read, so the policy's tokens are taken for its own: {error.message}"
            notice("reward.reward_model", message)
            return None
        if same_encoding(source, target):
            return None
        notice(
            "reward.reward_model",
            "its tokenizer or chat template is not the policy's: conversations are rendered again by its chat template",
        )
        return Rewriter(source, target, self.max_length, processor_of(model, target))


def _tokenizer(model: HFModelConfig, key: str) -> Any:
    return hf_tokenizer(
        model.tokenizer_path or model.path,
        key=key,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )


def last_positions(mask: Tensor) -> Tensor:
    """Index of the last 1 of each row (B, T); 0 for a row without one."""
    return (mask * torch.arange(1, mask.shape[-1] + 1)).argmax(-1)


def with_end_column(data: DataProto) -> DataProto:
    """The batch with one more response column, in which only the token after each response is selected.

    A value is that of the state BEFORE its token, so the state after the whole response is the value of the token that
    would follow; its id makes no difference.
    """
    tensors, mask = data.tensors, data.tensors["response_mask"]
    wide = mask.shape[-1] + 1
    one_more = torch.zeros(len(mask), 1, dtype=mask.dtype)
    rows = mask.bool().any(-1)
    selected = torch.zeros(len(mask), wide, dtype=mask.dtype)
    selected[rows, last_positions(mask)[rows] + 1] = 1
    attention = torch.cat([tensors["attention_mask"], one_more], dim=1)
    attention[:, -wide:] |= selected
    ids = torch.cat([tensors["input_ids"], one_more], dim=1)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, -wide:],
            "response_mask": selected,
        },
        non_tensors={name: data.non_tensor_batch[name] for name in (PICTURES,) if name in data.non_tensor_batch},
    )

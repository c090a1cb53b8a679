"""The mean of a model's last hidden states over the tokens of each answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from verl.engines import memory
from verl.engines.plain import PlainEngine
from verl.engines.rank_work import RankWork
from verl.engines.rows import MicroBatch
from verl.errors import EngineError
from verl.protocol import DataProto

STATES = "mean_states"
"""(B, H) float32."""


def with_states_of_tokens(batch: DataProto) -> DataProto:
    """The rows for a pass that computes the state *after* each response token.

    An engine computes states that predict a token, so the first response token moves to the prompt, and a token that
    nobody reads follows the last one.
    """
    tensors, columns = batch.tensors, batch.non_tensor_batch
    ids, attended, number = tensors["input_ids"], tensors["attention_mask"], tensors["responses"].shape[1]
    prompt, new_ids = ids.shape[1] - number, torch.cat([ids, ids[:, -1:]], 1)
    first = attended.new_ones(len(attended), 1)
    return DataProto.from_dict(
        tensors={
            "input_ids": new_ids,
            "attention_mask": torch.cat([attended[:, :prompt], first, attended[:, prompt:]], 1),
            "responses": new_ids[:, -number:],
            "response_mask": tensors["response_mask"],
        },
        non_tensors={name: columns[name] for name in ("multi_modal_inputs",) if name in columns},
    )


class StatesEngine(PlainEngine):
    """A frozen value model whose only output is `STATES`, means of what its head reads; each worker holds all of it.

    The arguments are those of `PlainEngine`, with ``kind="value"``.
    """

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.means = torch.empty(0)
        self.states = torch.empty(0)
        self.forward.head.register_forward_hook(self._take)

    def infer(
        self,
        batch: DataProto,
        outputs: tuple[str, ...] = (STATES,),
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
    ) -> dict[str, Tensor]:
        """(B, H): means over the positions with ``response_mask`` 1; zeros for a row without any.

        Args:
            batch: what `with_states_of_tokens` returns, for states after the tokens.

        Raises:
            EngineError: another output.
        """
        if outputs != (STATES,):
            raise EngineError("this engine has one output", got=outputs, allowed=(STATES,))
        self.means = torch.zeros(len(batch), self.model.config.get_text_config().hidden_size)
        super().infer(batch, ("values",), temperature, micro_batch_size, max_tokens)
        return {STATES: self.means}

    def _take(self, _: nn.Module, inputs: tuple[Any, ...], values: Tensor) -> None:
        self.states = inputs[0].detach()

    def _passes(
        self, work: RankWork, outputs: Sequence[str], temperature: float
    ) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
        for micro in work.micro_batches(self.device):
            with memory.explained(micro):
                computed = self.forward(micro, outputs, temperature)
            self.means[micro.index] = means_of_rows(self.states.float().squeeze(0), micro).cpu()
            yield micro.index, computed


def means_of_rows(states: Tensor, micro: MicroBatch) -> Tensor:
    """(N, H) states at the positions of a micro-batch -> (b, H), zeros for a row without any."""
    rows = micro.places // micro.num_responses
    sums = states.new_zeros(len(micro.index), states.shape[-1]).index_add_(0, rows, states)
    return sums / torch.bincount(rows, minlength=len(sums)).clamp(min=1)[:, None]

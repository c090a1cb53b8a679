"""The mean of a model's last hidden states over the tokens of each answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from verl import device as devices
from verl.engines import memory
from verl.engines.plain import PlainEngine
from verl.engines.rows import MicroBatch
from verl.errors import EngineError
from verl.models.head import select_positions
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
    """A frozen model whose only output is `STATES`; each worker holds all of it."""

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
        work = self._prepare("infer", batch, ("log_probs",), temperature, micro_batch_size, max_tokens)
        self.onload(optimizer=False)
        self.model.eval()
        means = torch.zeros(len(batch), self.model.config.get_text_config().hidden_size)
        with torch.no_grad():
            for micro in work.micro_batches(self.device):
                with memory.explained(micro):
                    means[micro.index] = self._means(micro).cpu()
        self._after_passes()
        self.offload(**self.idle)
        return {STATES: means}

    def _means(self, micro: MicroBatch) -> Tensor:
        """(b, H) float32."""
        with (
            devices.autocast(self.device, self.forward.dtype),
            select_positions(self.forward.head, micro.positions),
            _instead_of_logits(self.forward.head) as inputs_of_head,
        ):
            self.forward._run(micro)
        states, rows = inputs_of_head[0].float().squeeze(0), micro.places // micro.num_responses
        sums = states.new_zeros(len(micro.index), states.shape[-1]).index_add_(0, rows, states)
        return sums / torch.bincount(rows, minlength=len(sums)).clamp(min=1)[:, None]


@contextmanager
def _instead_of_logits(head: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block what reaches the head is put into the list, and no logits are computed."""
    inputs_of_head: list[Tensor] = []

    def take(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs_of_head.append(inputs[0])
        return (inputs[0][:, :0], *inputs[1:])

    handle = head.register_forward_pre_hook(take)
    try:
        yield inputs_of_head
    finally:
        handle.remove()

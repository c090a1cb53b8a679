"""Right-padded rows for a causal model: padding moves behind the tokens, and attention needs no mask.

A batch pads prompts on the left and responses on the right. Behind the last token of a row padding is harmless, because
no token looks forward; so rows are shifted to the left, cut to what the loss can see, and the model runs without a
mask on its fastest path. Packed rows (`packing`) have no padding at all. Shapes: B rows, T response tokens, L
longest row; b rows of a micro-batch, l its longest, N its positions with ``response_mask`` 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from verl.engines.seen_rows import COLUMN as PICTURES
from verl.engines.seen_rows import SeenRows, has_pictures
from verl.errors import DataError, ModelError
from verl.models.attention import AttentionPlan
from verl.models.router_replay import COLUMN, NO_RECORD
from verl.models.vision import VisionFamily, VisionInputs
from verl.protocol import CANDIDATES, DataProto


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads, and where its results belong.

    Args:
        index: (b,) rows of the batch.
        input_ids, position_ids: (b, l), padding behind the tokens; or (1, tokens) of a packed row. Positions of a model
            that sees are (1 + axes, b, l) in a batch with pictures: those of the text, then the rotary ones.
        positions: (N,) positions in the flattened tokens whose hidden state predicts a response token.
        labels: (N,) the predicted tokens.
        places: (N,) their places in the flattened (b * T).
        num_responses: T.
        attention: who attends to whom in a packed row; None where each row is a sequence.
        candidates: (N, K) tokens whose log-probs are compared at each position, where the batch has `CANDIDATES`.
        slopes: (N,) d loss / d log_probs, where the loss says so beforehand.
        padding: tokens at the end of a packed row that are no row's.
        token_of: (b, l) index of each token of the rows in the flattened tokens, -1 where it is none of them; only
            where experts are recorded or replayed.
        experts: (b, l, layers, top_k) those to replay, of each token of the rows.
        vision: the pictures that lie in it.
    """

    index: Tensor
    input_ids: Tensor
    position_ids: Tensor
    positions: Tensor
    labels: Tensor
    places: Tensor
    num_responses: int
    attention: AttentionPlan | None = None
    slopes: Tensor | None = None
    candidates: Tensor | None = None
    padding: int = 0
    token_of: Tensor | None = None
    experts: Tensor | None = None
    vision: VisionInputs | None = None

    @classmethod
    def filler(cls, device: str) -> MicroBatch:
        """One padding token and no row: what a rank computes that has no rows left while others still have some."""
        none, pad = torch.zeros(0, dtype=torch.long, device=device), torch.zeros(1, 1, dtype=torch.long, device=device)
        return cls(none.cpu(), pad, pad, none, none, none, num_responses=1)

    def lengthened(self, multiple: int) -> MicroBatch:
        """Padded rows, longer until their length is a multiple of it; the tokens at the end are nobody's."""
        length = self.input_ids.shape[1]
        missing = -length % multiple
        if not missing:
            return self
        row, column = self.positions // length, self.positions % length
        ids = F.pad(self.input_ids, (0, missing))
        return replace(
            self,
            input_ids=ids,
            position_ids=torch.arange(length + missing, device=ids.device).expand_as(ids),
            positions=row * (length + missing) + column,
        )

    def scatter(self, values: Tensor) -> Tensor:
        """(N, ...) -> (b, T, ...), zero elsewhere; gradients flow."""
        rest = values.shape[1:]
        flat = values.new_zeros(len(self.index) * self.num_responses, *rest).index_copy(0, self.places, values)
        return flat.view(len(self.index), self.num_responses, *rest)

    def recorded_experts(self) -> Tensor | None:
        """(tokens, layers, top_k) of the flattened tokens, `NO_RECORD` where there is no record of one."""
        if self.experts is None or self.token_of is None:
            return None
        flat = self.experts.new_full((self.input_ids.numel(), *self.experts.shape[2:]), NO_RECORD)
        here = self.token_of >= 0
        flat[self.token_of[here]] = self.experts[here]  # tokens that rows share have the same experts in all of them
        return flat.to(self.input_ids.device)

    def experts_by_row(self, experts: Tensor) -> Tensor:
        """The reverse: (tokens, layers, top_k) that a pass chose -> (b, l, layers, top_k)."""
        if self.token_of is None:
            return experts.new_zeros(0, 0, *experts.shape[1:])  # a filler
        rows = experts[self.token_of.clamp(min=0).to(experts.device)]
        rows[self.token_of.to(experts.device) < 0] = NO_RECORD
        return rows


@dataclass(frozen=True)
class AlignedRows:
    """A batch with every row shifted to the left.

    Args:
        tokens: (B, L) int64, zeros behind each row.
        before: (B, T) int64, the position in ``tokens`` of the token in front of response token t.
        responses: (B, T) int64.
        mask: (B, T) bool.
        lengths: per row how many tokens the model must read for the last masked response token, at least 1.
        prompts: per row how many tokens its prompt has.
        routes: experts are recorded or replayed, so micro-batches say where each token of a row is.
        experts: (B, L, layers, top_k) the recorded experts, if the batch has any.
        seen: the pictures in the rows, if the batch has any.
        candidates: (B, T, K) of `CANDIDATES`, if the batch has them.
    """

    tokens: Tensor
    before: Tensor
    responses: Tensor
    mask: Tensor
    lengths: list[int]
    prompts: list[int]
    routes: bool = False
    experts: Tensor | None = None
    seen: SeenRows | None = None
    candidates: Tensor | None = None

    @classmethod
    def of(cls, batch: DataProto, routes: bool = False, family: VisionFamily | None = None) -> AlignedRows:
        """From the standard fields of a batch; with ``routes`` also its recorded experts.

        Args:
            family: of a model that sees.
        """
        tensors: Any = batch.batch
        input_ids, attended = tensors["input_ids"].cpu(), tensors["attention_mask"].cpu().bool()
        responses, mask = tensors["responses"].cpu(), tensors["response_mask"].cpu().bool()
        places = attended.long().cumsum(-1) - 1
        if "position_ids" in tensors.keys():  # a TensorDict answers `in` only through its keys
            _check_positions(tensors["position_ids"].cpu(), places, attended)
        rows, columns = attended.nonzero(as_tuple=True)
        tokens = input_ids.new_zeros(len(input_ids), max([1, *attended.sum(-1).tolist()]))
        tokens[rows, places[rows, columns]] = input_ids[rows, columns]
        num_prompt = input_ids.shape[1] - responses.shape[1]
        before = places[:, num_prompt:] - 1
        _check_predictable(mask, attended[:, num_prompt:], before)
        reach = torch.where(mask, before + 1, 1)  # all responses of the batch are empty
        needed = reach.amax(-1).tolist() if reach.shape[1] else [1] * len(reach)
        prompts = attended[:, :num_prompt].sum(-1).tolist()
        experts = None
        if routes and COLUMN in tensors.keys():
            recorded = tensors[COLUMN].cpu()
            experts = recorded.new_full((*tokens.shape, *recorded.shape[2:]), NO_RECORD)
            experts[rows, places[rows, columns]] = recorded[rows, columns]
        seen = None
        if has_pictures(batch.non_tensor_batch):
            if family is None:
                raise ModelError("this model takes no images, and the batch has some", key=PICTURES)
            seen = SeenRows.of(batch.non_tensor_batch[PICTURES], tokens, attended.sum(-1).tolist(), family)
        candidates = tensors[CANDIDATES].cpu() if CANDIDATES in tensors.keys() else None
        return cls(tokens, before, responses, mask, needed, prompts, routes, experts, seen, candidates)

    def candidates_of(self, index: Tensor, row: Tensor, t: Tensor, device: str) -> Tensor | None:
        """(N, K) int64 of response tokens ``t`` in the rows ``index[row]``, on the device, if there are any."""
        return None if self.candidates is None else self.candidates[index][row, t].long().to(device)

    def micro_batch(self, rows: Sequence[int], device: str) -> MicroBatch:
        """The given rows, trimmed to the longest of them, on the device; a filler where there are none."""
        if not rows:
            return MicroBatch.filler(device)
        index = torch.tensor(rows, dtype=torch.long)
        length = max(self.lengths[row] for row in rows)
        row, t = self.mask[index].nonzero(as_tuple=True)
        before = self.before[index]
        position_ids = torch.arange(length).expand(len(rows), length)
        vision = None
        if self.seen is not None:
            position_ids = self.seen.with_axes_of_rows(position_ids, index)
            starts = [number * length for number in range(len(rows))]
            vision = self.seen.inputs([(row, 0, self.lengths[row]) for row in rows], starts, device)
        num_responses = self.mask.shape[1]
        return MicroBatch(
            index=index,
            input_ids=self.tokens[index, :length].to(device),
            position_ids=position_ids.to(device),
            positions=(row * length + before[row, t]).to(device),
            labels=self.responses[index][row, t].to(device),
            places=(row * num_responses + t).to(device),
            num_responses=num_responses,
            candidates=self.candidates_of(index, row, t, device),
            token_of=torch.arange(len(rows) * length).view(len(rows), length) if self.routes else None,
            experts=None if self.experts is None else self.experts[index, :length],
            vision=vision,
        )


def _check_positions(position_ids: Tensor, places: Tensor, attended: Tensor) -> None:
    if position_ids.dim() != 2:
        raise DataError(
            "position_ids count tokens, one number each: a model that sees gets its axes here",
            key="position_ids",
            got=tuple(position_ids.shape),
            allowed="(rows, tokens)",
        )
    wrong = ((position_ids != places) & attended).any(-1).nonzero().flatten().tolist()
    if wrong:
        raise DataError("position_ids must count the attended tokens from 0", key=f"row {wrong[0]}")


def _check_predictable(mask: Tensor, attended: Tensor, before: Tensor) -> None:
    hidden = (mask & ~attended).any(-1).nonzero().flatten().tolist()
    if hidden:
        raise DataError("response_mask is 1 on a token whose attention_mask is 0", key=f"row {hidden[0]}")
    first = (mask & (before < 0)).any(-1).nonzero().flatten().tolist()
    if first:
        raise DataError(
            "the first token of the sequence is to be trained on, and nothing precedes it",
            key=f"row {first[0]}",
            fix="Give the row a prompt, or set response_mask to 0 there.",
        )

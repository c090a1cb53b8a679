"""Micro-batches without padding: packed sequences, and a shared prefix once for all responses to it.

Which rows share a prompt is read off the tokens, so the result is exact whatever the rows are called. The cut into
micro-batches keeps rows of one prompt together as far as the limits allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from verl.algorithms.micro_batches import Plan, plan_micro_batches
from verl.engines.micro_batch import check_limits
from verl.engines.rows import AlignedRows, MicroBatch
from verl.models.attention import NO_PREFIX, PackedPlan, Segments


@dataclass(frozen=True)
class PromptFamily:
    """Rows of one prompt, which the packed row holds once.

    Args:
        shared: tokens that are shared; 0 for a single row.
    """

    rows: list[int]
    shared: int


def families(rows: AlignedRows, members: Iterable[int], share: bool) -> list[PromptFamily]:
    """The members grouped by prompt, longest prompt first; a prompt with one row is not worth a segment of its own."""
    if not share:
        return [PromptFamily([row], 0) for row in members]
    by_prompt: dict[bytes, list[int]] = {}
    tokens = rows.tokens.numpy()
    experts = None if rows.experts is None else rows.experts.numpy()
    for row in members:
        prompt = tokens[row, : rows.prompts[row]].tobytes()
        if experts is not None:  # what is computed once has one choice of experts
            prompt += experts[row, : rows.prompts[row]].tobytes()
        if rows.seen is not None:
            prompt += rows.seen.digest(row, rows.prompts[row])
        by_prompt.setdefault(prompt, []).append(row)
    result = []
    for group in by_prompt.values():
        shared = min(rows.prompts[group[0]], max(rows.lengths[row] for row in group)) if len(group) > 1 else 0
        result.append(PromptFamily(group, shared))
    return result


def costs(rows: AlignedRows, members: Iterable[PromptFamily]) -> dict[int, int]:
    """Row -> tokens that it adds to a micro-batch; the first of a family pays for the prompt."""
    tokens: dict[int, int] = {}
    for family in members:
        tokens |= {row: max(0, rows.lengths[row] - family.shared) for row in family.rows}
        tokens[family.rows[0]] += family.shared
    return tokens


def plan_packed(
    rows: AlignedRows, micro_batch_size: int | None = None, max_tokens: int | None = None, share: bool = False
) -> Plan:
    """Cut rows into micro-batches.

    Args:
        micro_batch_size: at most that many rows each.
        max_tokens: the tokens that the model computes stay within this budget.
        share: rows with the same prompt go together, which then counts once.

    Raises:
        ConfigError: a limit is not positive, or one row alone exceeds the budget.
    """
    check_limits(rows.lengths, micro_batch_size, max_tokens)
    everyone = range(len(rows.lengths))
    all_families = families(rows, everyone, share)
    parts = [part for family in all_families for part in _fitting(rows, family, micro_batch_size, max_tokens)]
    order = [row for part in parts for row in part.rows]
    tokens = costs(rows, parts)
    plan = plan_micro_batches(
        [tokens[row] for row in order],
        micro_batch_size=micro_batch_size,
        max_tokens=max_tokens,
        group_ids=[number for number, part in enumerate(parts) for _ in part.rows],
    )
    return [[order[i] for i in part] for part in plan]


def plan_packed_together(
    rows: AlignedRows,
    together: int,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    share: bool = False,
) -> Plan:
    """As `plan_packed`, with every ``together`` consecutive rows in one micro-batch and in their order.

    Raises:
        ConfigError: see `plan_packed`; also rows that belong together and exceed the budget.
    """
    assert len(rows.lengths) % together == 0, "the last rows lack their fellows"
    check_limits(rows.lengths, micro_batch_size, max_tokens)
    units = [range(first, first + together) for first in range(0, len(rows.lengths), together)]
    plan = plan_micro_batches(
        [sum(costs(rows, families(rows, unit, share)).values()) for unit in units],
        micro_batch_size=None if micro_batch_size is None else max(1, micro_batch_size // together),
        max_tokens=max_tokens,
    )
    return [[row for unit in part for row in units[unit]] for part in plan]


def _fitting(
    rows: AlignedRows, family: PromptFamily, micro_batch_size: int | None, max_tokens: int | None
) -> list[PromptFamily]:
    """The family cut into parts that fit into a micro-batch each."""
    parts: list[list[int]] = []
    tokens = 0
    for row in sorted(family.rows, key=lambda row: -rows.lengths[row]):
        suffix = max(0, rows.lengths[row] - family.shared)
        full = bool(parts) and (
            (micro_batch_size is not None and len(parts[-1]) >= micro_batch_size)
            or (max_tokens is not None and tokens + suffix > max_tokens)
        )
        if not parts or full:
            parts.append([])
            tokens = family.shared
        parts[-1].append(row)
        tokens += suffix
    return [PromptFamily(part, family.shared if len(part) > 1 else 0) for part in parts]


def pack_rows(rows: AlignedRows, members: Sequence[int], device: str, share: bool = False) -> MicroBatch:
    """The members as one packed row on the device: shared prompts, what follows them, then rows that share nothing."""
    if not members:
        return MicroBatch.filler(device)
    ordered = sorted(families(rows, members, share), key=lambda f: (-f.shared, -rows.lengths[f.rows[0]]))
    shared = [family for family in ordered if family.shared]
    pieces: list[tuple[int, int, int]] = [(family.rows[0], 0, family.shared) for family in shared]
    prefix = [NO_PREFIX] * len(pieces)
    for number, family in enumerate(ordered):
        for member in family.rows:
            if rows.lengths[member] > family.shared:
                pieces.append((member, family.shared, rows.lengths[member]))
                prefix.append(number if family.shared else NO_PREFIX)
    segments = Segments(tuple(end - start for _, start, end in pieces), tuple(prefix), device)
    starts = segments.starts
    prompt_of = {member: (starts[n], family.shared) for n, family in enumerate(shared) for member in family.rows}
    suffixes = {member: starts[n] for n, (member, _, _) in enumerate(pieces) if n >= len(shared)}
    index = torch.tensor(members, dtype=torch.long)
    row, t = rows.mask[index].nonzero(as_tuple=True)
    seen = rows.seen
    return MicroBatch(
        index=index,
        input_ids=torch.cat([rows.tokens[r, start:end] for r, start, end in pieces])[None].to(device),
        position_ids=segments.position_ids if seen is None else seen.with_axes(segments.position_ids, pieces),
        positions=_places_in_row(rows.before[index][row, t], row, members, prompt_of, suffixes).to(device),
        labels=rows.responses[index][row, t].to(device),
        places=(row * rows.mask.shape[1] + t).to(device),
        num_responses=rows.mask.shape[1],
        candidates=rows.candidates_of(index, row, t, device),
        attention=PackedPlan(segments, () if seen is None else seen.runs_ahead(pieces, starts)),
        token_of=_tokens_of(rows, members, prompt_of, suffixes) if rows.routes else None,
        experts=None if rows.experts is None else rows.experts[index, : max(rows.lengths[r] for r in members)],
        vision=None if seen is None else seen.inputs(pieces, starts, device),
    )


def _tokens_of(
    rows: AlignedRows, members: Sequence[int], prompt_of: dict[int, tuple[int, int]], suffixes: dict[int, int]
) -> Tensor:
    """(b, l) index of each token of the members in the packed row, -1 behind a member's last."""
    table = torch.full((len(members), max(rows.lengths[r] for r in members)), -1, dtype=torch.long)
    for number, member in enumerate(members):
        (first, shared), length = prompt_of.get(member, (0, 0)), rows.lengths[member]
        table[number, :shared] = torch.arange(first, first + shared)
        if length > shared:
            table[number, shared:length] = torch.arange(suffixes[member], suffixes[member] + length - shared)
    return table


def _places_in_row(
    before: Tensor, row: Tensor, members: Sequence[int], prompt_of: dict[int, tuple[int, int]], suffixes: dict[int, int]
) -> Tensor:
    """The index in the packed row of token ``before`` of a member (its number in ``row``)."""
    prompt = torch.tensor([prompt_of.get(r, (0, 0)) for r in members], dtype=torch.long)
    suffix_start = torch.tensor([suffixes.get(r, 0) for r in members], dtype=torch.long)[row]
    first, shared = prompt[row].unbind(-1)
    return torch.where(before < shared, first + before, suffix_start + before - shared)


def padded(micro: MicroBatch, multiple: int) -> MicroBatch:
    """Padded to a multiple of this number of tokens; the padding is a segment that nothing attends to.

    A filler, which is no packed row, stays as it is.
    """
    if not isinstance(micro.attention, PackedPlan):
        return micro
    segments = micro.attention.segments
    missing = -segments.num_tokens % multiple
    if not missing:
        return micro
    segments = Segments((*segments.lengths, missing), (*segments.prefix, NO_PREFIX), segments.device)
    ids = F.pad(micro.input_ids, (0, missing))
    return replace(
        micro,
        input_ids=ids,
        position_ids=F.pad(micro.position_ids, (0, missing)),
        attention=replace(micro.attention, segments=segments),
        padding=micro.padding + missing,
    )


def computed_tokens(rows: AlignedRows, plan: Iterable[Sequence[int]], share: bool, multiple: int = 1) -> int:
    """Tokens that go through the model for a plan of packed micro-batches, each `padded` to a multiple."""
    tokens = (sum(costs(rows, families(rows, part, share)).values()) for part in plan if part)
    return sum(-(-count // multiple) * multiple for count in tokens)

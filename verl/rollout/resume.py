"""Resuming an interrupted response: its tokens so far become the prefix of the next attempt.

Log-probs and versions stay with the tokens that they belong to, and the caller sees one completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from verl.rollout.base import Completion, Request


def continued(request: Request, done: Completion) -> Request:
    """The request for the rest of a response.

    Args:
        done: what the last attempt at ``request`` made.
    """
    return replace(request, generated_prefix=(*request.generated_prefix, *done.token_ids))


def after(done: Completion, count: int) -> Completion:
    """What a completion has after its first ``count`` tokens."""
    return replace(
        done,
        token_ids=done.token_ids[count:],
        log_probs=done.log_probs[count:],
        token_versions=done.token_versions[count:],
    )


def join_attempts(parts: Sequence[Completion]) -> Completion:
    """The attempts at one response, in order, as one completion.

    Log-probs are there where every attempt has them, experts as far as any attempt has them;
    ``num_preempted`` is the sum of those known.
    """
    last = parts[-1]
    if len(parts) == 1:
        return last
    has_log_probs = all(len(part.log_probs) == len(part.token_ids) for part in parts)
    counts = [part.num_preempted for part in parts if part.num_preempted >= 0]
    return replace(
        last,
        token_ids=_chained(part.token_ids for part in parts),
        log_probs=_chained(part.log_probs for part in parts) if has_log_probs else (),
        token_versions=_chained(part.token_versions for part in parts),
        routed_experts=_experts(parts),
        num_preempted=sum(counts) if counts else last.num_preempted,
    )


def _chained(pieces: Any) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(pieces))


def _experts(parts: Sequence[Completion]) -> Any:
    """Each token's are those of the pass that drew the next one, so what earlier attempts recorded stays."""
    joined = None
    for part in parts:
        if part.token_ids and part.routed_experts is not None:
            joined = append_experts(joined, part.routed_experts)
    return joined


def append_experts(known: np.ndarray | None, later: np.ndarray) -> np.ndarray:
    """The experts of a resumed sequence: those of its prefix, then those that a later request adds.

    Args:
        known: (tokens, layers, top_k) so far; None: nothing.
        later: of a request whose prompt begins with these tokens.
    """
    return later if known is None else np.concatenate([known, later[len(known) :]])

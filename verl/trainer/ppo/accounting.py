"""What becomes of samples, entered into the run's ledger (``trainer.ledger``): one function per event.

A sample is known by its prompt's ``uid`` and its ``sample_index``. Without a ledger functions of events do nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.journal.account import Key
from verl.protocol import DataProto
from verl.trainer.ppo.correction import KEPT_MASK
from verl.trainer.ppo.trajectories import sampled_tokens, version_bounds

if TYPE_CHECKING:
    from verl.trainer.ppo.context import StepContext

ERROR, SAMPLE, ROW = "agent_error", "sample_index", "__row__"
LEARNED = "learned"
"""Column (B,) bool: what the update learns from, where a method selects rows; without it that is all of the batch."""


def keys_of(batch: DataProto) -> list[Key]:
    """Which sample each row is."""
    columns = batch.non_tensor_batch
    return list(zip(map(str, columns["uid"]), map(int, columns[SAMPLE]), strict=True))


def was_updated(roles: Container[str], ctx: StepContext) -> bool:
    """Whether the step updates a model: before ``trainer.critic_warmup`` only a critic learns."""
    return "critic" in roles or ctx.step >= ctx.config.trainer.critic_warmup


def names_of(batch: DataProto) -> dict[str, list[Any]]:
    """How the ledger names each row of a batch (``uid``, ``sample``), and its row of the data (``row``), for dumps."""
    columns = batch.non_tensor_batch
    return {name: list(columns[of]) for name, of in (("uid", "uid"), ("sample", SAMPLE), ("row", ROW)) if of in columns}


def ask(prompts: DataProto, ctx: StepContext) -> None:
    """These rows go to the sampler next."""
    if ctx.run.ledger is not None:
        rows, epoch = prompts.non_tensor_batch.get(ROW), ctx.run.epoch_of(ctx.step)
        ctx.run.ledger.requested(ctx.step, epoch, keys_of(prompts), None if rows is None else list(rows))


def sampled(samples: DataProto, ctx: StepContext) -> None:
    """Responses have come: their turns, tokens, how they ended, and which weights drew them."""
    if ctx.run.ledger is None:
        return
    columns = samples.non_tensor_batch
    named = {"turns": "__num_turns__", "finish": "finish_reason", "error": ERROR}
    facts: dict[str, list[Any]] = {name: list(columns[of]) for name, of in named.items() if of in columns}
    facts["tokens"] = sampled_tokens(samples)
    if "token_versions" in samples.tensors.keys():
        oldest, newest = version_bounds(samples)
        facts["newest_version"], facts["oldest_version"] = newest.tolist(), oldest.tolist()
    ctx.run.ledger.noted("sampled", ctx.step, keys_of(samples), **facts)


def scored(samples: DataProto, ctx: StepContext) -> None:
    """Samples have their scores."""
    if ctx.run.ledger is not None:
        scores = samples.tensors["token_level_scores"].sum(-1).tolist()
        ctx.run.ledger.noted("scored", ctx.step, keys_of(samples), score=scores)


def drop(samples: DataProto, reason: str, ctx: StepContext) -> None:
    """Samples that will not be trained on, for one of `verl.journal.account.REASONS`."""
    if ctx.run.ledger is not None:
        ctx.run.ledger.dropped(ctx.step, reason, keys_of(samples))


def drop_rows(samples: DataProto, rows: np.ndarray, reason: str, ctx: StepContext) -> None:
    """The same for those rows (B,) bool of them."""
    if ctx.run.ledger is not None and rows.any():
        ctx.run.ledger.dropped(ctx.step, reason, list(compress(keys_of(samples), rows)))


def batched(batch: DataProto, ctx: StepContext) -> None:
    """These are the samples of the step's batch."""
    if ctx.run.ledger is not None:
        ctx.run.ledger.noted("batch", ctx.step, keys_of(batch))


def chosen(batch: DataProto, rows: DataProto, ctx: StepContext) -> None:
    """The rows that an update learns from, of those of the batch; files of tokens say so as the ledger does."""
    if (ctx.run.ledger is not None or ctx.run.dumps_tokens) and rows is not batch:
        selected = set(compress(keys_of(rows), rows.tensors["response_mask"].bool().any(-1).tolist()))
        batch.non_tensor_batch[LEARNED] = np.array([key in selected for key in keys_of(batch)])


def trained(batch: DataProto, ctx: StepContext, updated: bool = True) -> None:
    """The step's updates were made; what is masked in the batch was not trained on.

    Args:
        updated: whether any model was.
    """
    if ctx.run.ledger is None:
        return
    reason_of = dict[Key, str]()
    for key, reason in zip(keys_of(batch), reasons_of(batch, ctx, updated)):
        reason_of[key] = reason and reason_of.get(key, reason)  # trained on in any of its rows is trained on
    by_reason = dict[str, list[Key]]({"": []})
    for key, reason in reason_of.items():
        by_reason.setdefault(reason, []).append(key)
    ctx.run.ledger.trained(ctx.step, by_reason.pop(""), by_reason)


def reasons_of(batch: DataProto, ctx: StepContext, updated: bool) -> Iterator[str]:
    """Why each row was not trained on; empty for those that were."""
    columns, tensors, rows = batch.non_tensor_batch, batch.tensors, range(len(batch))
    masked = columns.get("unscorable", np.zeros(len(batch))).astype(bool).tolist()
    has_trained_tokens = tensors.get(KEPT_MASK, tensors["response_mask"]).bool().any(-1)
    rejected = (tensors["response_mask"].bool().any(-1) & ~has_trained_tokens).tolist()
    learned = columns.get(LEARNED, np.ones(len(batch))).astype(bool).tolist()
    method = "not_paired" if ctx.run.learns_from_pairs else "not_drawn"
    for row in rows:
        if masked[row]:
            yield _why_masked(columns, row)
        elif rejected[row]:
            yield "rejected"
        elif not updated:
            yield "warm_up"
        else:
            yield "" if learned[row] else method


def _why_masked(columns: Mapping[str, np.ndarray], row: int) -> str:
    if "finish_reason" not in columns or columns["finish_reason"][row] != "abort":
        return "unscorable"
    return "failed_loop" if ERROR in columns and columns[ERROR][row] else "given_up"


def waiting_in(batches: Iterable[DataProto]) -> list[Key]:
    """The samples that wait in these batches."""
    return [key for batch in batches for key in keys_of(batch)]

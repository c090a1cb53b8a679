"""Why a sample of a batch was not trained on, as the run's ledger has it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from verl.journal.file import Journal
from verl.journal.ledger import Ledger
from verl.journal.ledger_reader import History
from verl.protocol import DataProto
from verl.trainer.ppo import accounting

MASK = torch.tensor([[1, 1], [0, 0], [0, 0], [0, 0], [1, 0], [1, 1]])


def batch() -> DataProto:
    """A row each: an ordinary one, unscorable, given up, failed, rejected, and one more ordinary one."""
    kept = MASK.clone()
    kept[4] = 0
    versions = torch.tensor([[3, 5], [5, -1]] * 3, dtype=torch.int32)
    return DataProto.from_dict(
        {"response_mask": MASK, "rollout_rs_mask": kept, "token_versions": versions},
        {
            "uid": np.array(list("aabbcc"), dtype=object),
            "sample_index": np.array([0, 1] * 3, dtype=object),
            "unscorable": np.array([False, True, True, True, False, False]),
            "finish_reason": np.array(["stop", "stop", "abort", "abort", "length", "stop"], dtype=object),
            "agent_error": np.array([None, None, None, "tool: it broke", None, None], dtype=object),
        },
    )


def test_every_row_of_a_batch_is_trained_on_or_dropped_for_its_own_reason(tmp_path):
    journal = Journal(tmp_path)
    journal.begin()
    run = SimpleNamespace(ledger=Ledger(journal), learns_from_pairs=False, epoch_of=lambda step: 0)
    ctx = SimpleNamespace(step=6, run=run)
    rows = batch()
    accounting.ask(rows, ctx)
    accounting.sampled(rows, ctx)
    accounting.chosen(rows, rows.select_idxs([0, 0, 1, 2, 3, 4]), ctx)  # PF-PPO drew the first twice, the last never
    accounting.trained(rows, ctx)
    ctx.run.ledger.check([])
    samples = History.of(journal.path).samples
    assert [one.facts.get("reason", one.stage) for one in samples] == [
        "trained", "unscorable", "given_up", "failed_loop", "rejected", "not_drawn"
    ]  # fmt: skip
    assert [(one.facts["oldest_version"], one.facts["newest_version"]) for one in samples[:2]] == [(3, 5), (5, 5)]
    assert samples[3].facts["error"] == "tool: it broke"

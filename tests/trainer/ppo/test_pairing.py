"""Pairs of sampled answers: which two they are, and that no mini-batch, rank or micro-batch parts them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests.trainer.ppo.test_stages import batch, context
from verl.engines.micro_batch import plan_together
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.trainer.ppo import stages
from verl.trainer.ppo.learned_rows import pair_up, rows_to_train
from verl.workers.options import TrainOptions

SPIN = {"actor_rollout_ref.actor.policy_loss.loss_mode": "recipe.spin.core:dpo"}


def judged(scores: list[float], per_prompt: int, lengths: list[int] | None = None) -> DataProto:
    """Rows with GRPO's advantages; ``row`` says which is which."""
    made = batch(scores, [f"p{row // per_prompt}" for row in range(len(scores))], lengths)
    stages.add_advantages(made, context())
    made.tensors["row"] = torch.arange(len(scores))
    return made


def paired(scores: list[float], per_prompt: int, lengths: list[int] | None = None) -> tuple[list[int], MetricSet]:
    metrics = MetricSet()
    pairs = pair_up(judged(scores, per_prompt, lengths), per_prompt, metrics)
    there = pairs.tensors["response_mask"].any(-1)
    return torch.where(there, pairs.tensors["row"], -1).tolist(), metrics.values()


def test_the_best_answer_comes_first_and_the_worst_behind_it():
    rows, metrics = paired([0.5, 2.0, -1.0, 0.0, 3.0, 1.0, 2.0, 1.5], per_prompt=4)
    assert rows == [1, 2, 4, 5]
    assert metrics == {"training/pairs": 2, "training/tied_prompts": 0.0, "training/pair_score_gap": 2.5}


def test_prompts_whose_answers_are_all_as_good_have_no_pair_and_are_counted():
    rows, metrics = paired([1.0, 1.0, 0.0, 1.0, 0.3, 0.3, 0.5, 0.5], per_prompt=2, lengths=[4, 1, 2, 3, 3, 1, 2, 4])
    assert rows == [-1, -1, 3, 2, -1, -1, -1, -1]
    assert metrics == {"training/pairs": 1, "training/tied_prompts": 0.75, "training/pair_score_gap": 1.0}


def test_of_equally_good_answers_the_first_is_taken_whatever_their_length():
    rows, _ = paired([0.1, 0.7, 0.7, 0.1], per_prompt=4, lengths=[1, 2, 4, 3])
    assert rows == [1, 0]


def test_a_batch_of_ties_alone_has_no_token():
    rows, metrics = paired([1.0] * 4, per_prompt=2)
    assert rows == [-1] * 4 and metrics == {"training/pairs": 0, "training/tied_prompts": 1.0}


def test_an_answer_without_a_score_is_in_no_pair():
    made = judged([0.0, 1.0, 0.5, 1.0, 0.0, 0.0], per_prompt=3)
    stages.leave_out(made, np.array([True, False, False, False, True, True]))
    pairs = pair_up(made, 3, MetricSet())
    assert pairs.tensors["row"][:2].tolist() == [1, 2]
    assert pairs.tensors["response_mask"].sum(-1).tolist() == [3, 3, 0, 0], "one answer alone is better than none"


@dataclass
class Trained:
    """The actor's handle, which keeps the mini-batches that it is handed."""

    num_parts: int
    shuffle: bool
    name: str = "actor"
    mini_batch_size: int = 4
    epochs: int = 2
    seed: int = 3
    seen: list[DataProto] = field(default_factory=list)

    def train(self, mini_batch: DataProto, options: TrainOptions) -> MetricSet:
        self.seen.append(mini_batch)
        return MetricSet()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_no_mini_batch_rank_or_micro_batch_parts_a_pair(ranks: int, shuffle: bool):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (24,), generator=generator).double().tolist()
    lengths = torch.randint(1, 5, (24,), generator=generator).tolist()
    changes = {**SPIN, "actor_rollout_ref.rollout.n": 3, "data.train_batch_size": 8}
    ctx, actor = context(**changes), Trained(ranks, shuffle)
    made = judged(scores, 3, lengths)
    made.tensors["prompts"] = made.tensors["row"]  # one of the columns that an update gets
    rows = rows_to_train(made, ctx)
    stages.train(actor, rows, ctx)

    expected = {tuple(pair) for pair in rows.tensors["row"].view(-1, 2).tolist()}
    assert len(actor.seen) == 4 and [len(part) for part in actor.seen] == [8] * 4
    for epoch in (actor.seen[:2], actor.seen[2:]):
        shares = [share for part in epoch for share in part.chunk(ranks)]
        found = [tuple(pair) for share in shares for pair in share.tensors["prompts"].view(-1, 2).tolist()]
        assert set(found) == expected and len(found) == len(expected) == 8
        for share in shares:
            spans = share.tensors["attention_mask"].sum(-1).tolist()
            for plan in (plan_together(spans, 2, micro_batch_size=3), plan_together(spans, 2, max_tokens=10)):
                assert all(second == first + 1 for part in plan for first, second in zip(part[0::2], part[1::2]))
    if shuffle:
        assert [p.tensors["prompts"].tolist() for p in actor.seen[:2]] != [
            p.tensors["prompts"].tolist() for p in actor.seen[2:]
        ]


def test_other_losses_train_on_the_batch_as_it_is():
    made = judged([1.0, 0.0], per_prompt=2)
    assert rows_to_train(made, context()) is made

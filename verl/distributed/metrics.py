"""Metrics of several ranks as one set, which every rank has."""

from __future__ import annotations

from collections.abc import Sequence

from verl.distributed.ranks import Ranks
from verl.json_text import Json
from verl.metrics import Metric, MetricSet


def merge_metrics(
    loss: float, metrics: MetricSet, ranks: Ranks, num_peers: int = 1, counted: Sequence[int] | None = None
) -> tuple[float, MetricSet]:
    """The mean of a loss over ranks, and each metric merged by its own reduction, in rank order.

    Args:
        loss: this rank's share, scaled so that the mean over ranks is the global value.
        metrics: a rank without rows may have none of those that others have.
        num_peers: model-parallel peers, which have the same rows, and so the same numbers, which then count once.
        counted: the ranks whose numbers count, where those are not every ``num_peers``-th.
    """
    if ranks.size == 1:
        return loss, metrics
    mine: Json = [[name, m.value, m.reduction, m.weight] for name, m in metrics.items()]
    answers = ranks.exchange({"loss": loss, "metrics": mine})
    counted_answers = answers[::num_peers] if counted is None else [answers[rank] for rank in counted]
    everything = MetricSet()
    for answer in counted_answers:
        everything.merge({name: Metric(value, kind, weight) for name, value, kind, weight in answer["metrics"]})
    return sum(answer["loss"] for answer in counted_answers) / len(counted_answers), everything

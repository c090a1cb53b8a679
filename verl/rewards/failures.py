"""What happens when samples could not be scored: the first one is shown, the others are counted, or the run stops."""

from __future__ import annotations

from collections.abc import Sequence

from verl.errors import RewardError
from verl.metrics import Metric, notice
from verl.rewards.samples import RewardFailure, RewardResult, RewardSample
from verl.rewards.scoring import OnError


def report_failures(
    samples: Sequence[RewardSample], results: Sequence[RewardResult], label: str, on_error: OnError
) -> None:
    """Show the first failure once per run, with function, file, row and the traceback of the user's code.

    Raises:
        RewardError: ``on_error`` is ``raise`` and a sample failed, or every sample failed.
    """
    failed = [(sample, result.failure) for sample, result in zip(samples, results, strict=True) if result.failure]
    if not failed:
        return
    sample, failure = failed[0]
    what = f"reward function {label} failed on {sample.place}: {failure.message}"
    if on_error == "raise":
        raise RewardError(what, fix=_way_out(failure)) from failure.exception
    if len(failed) == len(results):
        raise RewardError(
            f"all {len(results)} samples of a batch failed, so there is nothing to learn from. The first: {what}",
            fix=_way_out(failure),
        ) from failure.exception
    notice(
        f"reward function {label}",
        "\n".join(
            filter(
                None,
                [
                    what,
                    failure.trace.rstrip(),
                    f"{len(failed)} of {len(results)} samples of this batch are masked, counted as reward/unscorable; "
                    "further failures are only counted. reward.on_error=raise stops the run instead.",
                ],
            )
        ),
    )


def failure_metrics(results: Sequence[RewardResult]) -> dict[str, Metric]:
    """How many samples got no score, and which share."""
    failed = sum(result.failure is not None for result in results)
    return {
        "reward/unscorable": Metric(float(failed), "sum"),
        "reward/unscorable_fraction": Metric(failed / max(len(results), 1), "mean", len(results)),
    }


def _way_out(failure: RewardFailure) -> str:
    if failure.kind == "timeout":
        return "reward.timeout sets the time limit."
    return "python -m verl.rewards.check <file> --data <data> tries the function without a run."

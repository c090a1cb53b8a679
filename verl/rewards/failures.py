"""What happens when samples could not be scored: the first one is shown, the others are counted, or the run stops."""

from __future__ import annotations

from collections.abc import Sequence

from verl.errors import RewardError
from verl.metrics import Metric, notice
from verl.rewards.samples import RewardFailure, RewardResult, RewardSample
from verl.rewards.scoring import OnError


class NothingScored(RewardError):
    """Every sample of a batch failed and is masked: a group of a queue is left out, any other batch ends the run."""


def report_failures(
    samples: Sequence[RewardSample],
    results: Sequence[RewardResult],
    label: str,
    on_error: OnError,
    ours: bool = False,
) -> None:
    """Show the first failure once per run, with function, file, row and the traceback of the user's code.

    Args:
        ours: whether the function is one of this library; where it fails on a text, the answer counts as empty.

    Raises:
        NothingScored: every sample failed, and is masked.
        RewardError: ``on_error`` is ``raise`` and a sample failed, or every sample failed, or the function's process
            does not start any more: no sample is masked for what is not its doing.
    """
    if ours:
        _report_scored(samples, results)
    _report_undecided(samples, results)
    failed = [
        (sample, failure, result.failure is not None)
        for sample, result in zip(samples, results, strict=True)
        if (failure := result.failure or (None if ours else result.caught))
    ]
    if not failed:
        return
    sample, failure, masked = next((entry for entry in failed if entry[1].kind == "start"), failed[0])
    what = f"reward function {label} failed on {sample.place}: {failure.message}"
    shown = f"{what} ({failure.line})" if failure.line else what
    if on_error == "raise":
        raise RewardError(shown, fix=_way_out(failure)) from failure.exception
    if len(failed) == len(results) or failure.kind == "start":
        counted = (
            f"{len(failed)} of {len(results)} samples of a batch failed, and the function's process is gone for good"
        )
        if len(failed) == len(results):
            counted = f"all {len(results)} samples of a batch failed, so there is nothing to learn from"
        is_masked = failure.kind != "start" and all(masked for *_, masked in failed)
        raise (NothingScored if is_masked else RewardError)(
            f"{counted}. The first: {shown}", fix=_way_out(failure)
        ) from failure.exception
    became = "are masked" if masked else "have the score 0"
    notice(
        f"reward function {label}",
        _lines(
            what,
            failure.trace.rstrip(),
            f"{len(failed)} of {len(results)} samples of this batch {became}, counted as reward/unscorable; "
            "further failures are only counted. reward.on_error=raise stops the run instead.",
        ),
    )


def failure_metrics(results: Sequence[RewardResult], ours: bool = False) -> dict[str, Metric]:
    """How many samples got no score from their function, and their share; a built-in scorer's failures separately."""
    failed = sum(result.failure is not None or (result.caught is not None and not ours) for result in results)
    metrics = {
        "reward/unscorable": Metric(float(failed), "sum"),
        "reward/unscorable_fraction": Metric(failed / max(len(results), 1), "mean", len(results)),
    }
    if ours:
        caught = sum(result.caught is not None for result in results)
        metrics["reward/unscorable_builtin"] = Metric(float(caught), "sum")
    undecided = sum(bool(result.undecided) for result in results)
    if ours or undecided:
        metrics["reward/undecided"] = Metric(float(undecided), "sum")
    judged = [result.extra["judge_no_verdict"] for result in results if "judge_no_verdict" in result.extra]
    if judged:
        metrics["reward/judge_no_verdict"] = Metric(float(sum(map(bool, judged))), "sum")
    return metrics


def _report_undecided(samples: Sequence[RewardSample], results: Sequence[RewardResult]) -> None:
    """The notice on answers that could not be compared with their truth."""
    cases = [(s, result.undecided) for s, result in zip(samples, results, strict=True) if result.undecided]
    if cases:
        share, first = f"{len(cases)} of {len(results)}", f"{cases[0][0].place}: {cases[0][1]}"
        message = (
            f"{share} answers could not be compared with the truth in time and count as wrong. The first, {first}."
        )
        notice("reward/undecided", f"{message} The metric counts further ones.")


def _report_scored(samples: Sequence[RewardSample], results: Sequence[RewardResult]) -> None:
    """The notice on texts on which a built-in scorer failed."""
    caught = [(s, result.caught) for s, result in zip(samples, results, strict=True) if result.caught is not None]
    if not caught:
        return
    sample, failure = caught[0]
    notice(
        "reward/unscorable_builtin",
        _lines(
            f"the built-in scorer failed on {len(caught)} of {len(results)} samples, which count as empty answers. "
            f"The first, {sample.place}: {failure.message}",
            failure.trace.rstrip(),
            "This is a fault of the library: no text may do that. The metric counts further ones.",
        ),
    )


def _lines(*parts: str) -> str:
    return "\n".join(filter(None, parts))


def _way_out(failure: RewardFailure) -> str:
    if failure.kind == "timeout":
        return "reward.timeout sets the time limit, reward.num_workers how many samples are scored at once."
    return "python -m verl.rewards.check <file> --data <data> tries the function without a run."

"""What goes into a scorer and what comes out: one record each, the same in every process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FailureKind = Literal["raised", "refused", "timeout", "processor time", "value", "died", "start"]
"""``refused`` is an error that this library raised on purpose: about settings, data, a service, never about a text."""


@dataclass(frozen=True)
class RewardSample:
    """One answer to be scored.

    Example:
        >>> RewardSample("openai/gsm8k", "... #### 18", "18", {"index": 0}, row=0)
    """

    data_source: Any
    solution_str: str
    ground_truth: Any
    extra_info: Any = None
    row: int = 0

    @property
    def place(self) -> str:
        """Where the sample stands, in words that a person can look up."""
        index = self.extra_info.get("index") if isinstance(self.extra_info, dict) else None
        place = "" if index is None else f", extra_info.index {index}"
        return f"row {self.row} of the batch (data_source {self.data_source!r}{place})"


@dataclass(frozen=True)
class RewardFailure:
    """Why a sample has no score.

    ``trace`` is the traceback of the user's code and ``line`` the last line of the user's file in it; both are empty
    where there is none.
    """

    kind: FailureKind
    message: str
    trace: str = ""
    line: str = ""
    exception: BaseException | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RewardResult:
    """A finite score with the function's other values, or a failure; exactly one of the two.

    ``caught`` is the failure of a call whose sample has a score all the same: a built-in scorer that failed on a text
    (scored as an empty answer), or ``reward.on_error=zero``. ``undecided`` says why an answer could not be compared
    with the truth, and so counts as wrong.
    """

    score: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    failure: RewardFailure | None = None
    caught: RewardFailure | None = None
    undecided: str = ""


def all_failed(samples: Sequence[Any], failure: RewardFailure) -> list[RewardResult]:
    """The same failure for every sample of a call."""
    return [RewardResult(failure=failure) for _ in range(len(samples))]


def zeroed(result: RewardResult) -> RewardResult:
    """A failure as the score 0; any other result as it is."""
    return result if result.failure is None else RewardResult(0.0, result.extra, caught=result.failure)

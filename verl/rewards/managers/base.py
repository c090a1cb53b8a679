"""What the built-in managers share: read rows, score them, write each score on its token, report failures."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from verl.protocol import DataProto
from verl.protocol.lazy import one_entry
from verl.protocol.tokenizer import Tokenizer
from verl.rewards.dispatch import check_data_sources, default_compute_score
from verl.rewards.failures import failure_metrics, report_failures
from verl.rewards.forms import Form
from verl.rewards.function import RewardFunction
from verl.rewards.invoke import result_of
from verl.rewards.managers.abstract import AbstractRewardManager
from verl.rewards.managers.rows import RM_SCORE, SampleRow, is_scored, known_results, prompt_text, read_rows, tensor
from verl.rewards.samples import RewardResult, RewardSample
from verl.rewards.scoring import Isolation, Scorer, ScoringLimits
from verl.rewards.truths import needs_truth, notice_numbers

log = logging.getLogger("verl.rewards")


class RewardManager(AbstractRewardManager):
    """Scores a batch with a reward function.

    Calling it returns ``reward_tensor`` (B, T) float32 with each score on the last sampled token of its row,
    ``reward_extra_info`` (name -> list of B, None where a row has nothing), ``unscorable`` (list of B bools) and
    ``metrics``. If the batch was scored while it was sampled (``rm_scores``), these scores are used. Those of a reward
    model (column ``rm_score``) are the scores where no function of the user's is given; else the function reads them in
    ``extra_info["rm_score"]`` and what it returns counts.

    Args:
        tokenizer: decodes the responses.
        num_examine: how many rows of each data source are logged per call.
        compute_score: a reward function in any accepted form; None for the built-in scorers.
        reward_fn_key: the column that selects the built-in scorer.
    """

    isolation: Isolation = "auto"
    """Where this manager runs functions unless the limits say something else."""
    default_form: Form = Form.SINGLE
    """The form of a function that takes everything as ``**kwargs``."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        *,
        reward_kwargs: dict[str, Any] | None = None,
        limits: ScoringLimits | None = None,
    ):
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.compute_score = compute_score or default_compute_score
        self._function = RewardFunction.of(self.compute_score, reward_kwargs, self.default_form)
        self.configure(limits or ScoringLimits())

    def configure(self, limits: ScoringLimits) -> None:
        """Set time limit, isolation and what a failure does; before the first batch."""
        self.limits = replace(limits, isolation=self.isolation) if limits.isolation == "auto" else limits
        self._scorer = Scorer(self._function, self.limits)
        needed = self._function.is_builtin or (limits.needs_truth and needs_truth(self._function))
        self._needed_by = self._function if needed else None

    def __call__(self, data: DataProto, return_dict: bool = True) -> torch.Tensor | dict[str, Any]:
        """Score a batch; the tensor alone with ``return_dict=False``.

        Raises:
            RewardError: every sample failed, or one did and ``on_error`` is ``raise``, or a ``data_source`` is unknown.
        """
        if is_scored(data):
            early = given_scores(data)
            return early if return_dict else early["reward_tensor"]
        by_model = self._function.is_builtin and RM_SCORE in data.non_tensor_batch
        rows = read_rows(data, self.tokenizer, self.reward_fn_key, None if by_model else self._needed_by)
        samples = [row.sample for row in rows]
        if by_model:
            raw = [result_of(score) for score in data.non_tensor_batch[RM_SCORE]]
        else:
            raw = self._score(samples, known_results(data), self.reward_fn_key in data.non_tensor_batch)
            notice_numbers(self._function, samples, raw)
        results = [
            result if result.failure else self.adjust(row, result) for row, result in zip(rows, raw, strict=True)
        ]
        label = "the reward model" if by_model else self._function.label
        ours = self._function.is_ours and not by_model
        report_failures(samples, results, label, self.limits.on_error, ours)
        scores = one_entry(
            torch.tensor([result.score or 0.0 for result in results], dtype=torch.float32),
            torch.tensor([-1 if row.last is None else row.last for row in rows]),
            tensor(data, "responses"),
        )
        self._examine(data, samples, results)
        if not return_dict:
            return scores
        return {
            "reward_tensor": scores,
            "reward_extra_info": gather_extra(results),
            "unscorable": [result.failure is not None for result in results],
            "metrics": failure_metrics(results, ours),
        }

    def _score(
        self, samples: Sequence[RewardSample], known: Sequence[RewardResult | None], has_sources: bool
    ) -> list[RewardResult]:
        if self._function.is_builtin:
            check_data_sources([s.data_source for s in samples] if has_sources else None, self.reward_fn_key)
        unscored = [sample for sample, result in zip(samples, known, strict=True) if result is None]
        scored = iter(self._scorer.score(unscored))
        return [next(scored) if result is None else result for result in known]

    @property
    def label(self) -> str:
        """The function and its file, as messages name it."""
        return self._function.label

    @property
    def scores_rows(self) -> bool:
        """Whether each row is scored by itself, so that it need not wait for the batch."""
        return self._function.form is Form.SINGLE

    async def result_of_row(self, data: DataProto) -> RewardResult:
        """What the function says of a batch of one row, as long as others are being sampled (`verl.rewards.early`).

        Does not block the event loop.
        """
        (row,) = read_rows(data, self.tokenizer, self.reward_fn_key, self._needed_by)
        return await self._scorer.score_async(row.sample)

    def adjust(self, row: SampleRow, result: RewardResult) -> RewardResult:
        """A hook of subclasses: the result of a row, changed by what the manager knows beyond the function."""
        return result

    def close(self) -> None:
        """Stop the processes and threads of the reward function."""
        self._scorer.close()

    def _examine(self, data: DataProto, samples: Sequence[RewardSample], results: Sequence[RewardResult]) -> None:
        shown: Counter[str] = Counter()
        for i, (sample, result) in enumerate(zip(samples, results, strict=True)):
            source = str(sample.data_source)
            if shown[source] >= self.num_examine:
                continue
            shown[source] += 1
            log.info(
                "sample of %s\n[prompt] %s\n[response] %s\n[ground truth] %s\n[score] %s%s",
                source,
                prompt_text(data, self.tokenizer, i),
                sample.solution_str,
                sample.ground_truth,
                result.failure.message if result.failure else result.score,
                f" {result.extra}" if result.extra else "",
            )


def gather_extra(results: Sequence[RewardResult]) -> dict[str, list[Any]]:
    """The functions' values other than the score: one list per name, None for rows without it."""
    names = list(dict.fromkeys(name for result in results for name in result.extra))
    gathered = {name: [result.extra.get(name) for result in results] for name in names}
    if "score" in gathered:  # rows whose function returned a bare number have a score all the same
        gathered["score"] = [result.extra.get("score", result.score) for result in results]
    return gathered


def given_scores(data: DataProto) -> dict[str, Any]:
    """The scores that the batch brought along as ``rm_scores``, in the form that a manager returns."""
    scores = tensor(data, "rm_scores").float()
    columns = data.non_tensor_batch
    names = [name for name in data.meta_info.get("reward_extra_keys", ()) if name in columns]
    unscorable = [bool(flag) for flag in columns["unscorable"]] if "unscorable" in columns else [False] * len(scores)
    return {
        "reward_tensor": scores,
        "reward_extra_info": {name: list(columns[name]) for name in names},
        "unscorable": unscorable,
        "metrics": {},
    }

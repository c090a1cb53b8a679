"""Log-probs of given tokens: what a model that samples nothing, a teacher, is queried for, and what may be its answer.

Shapes: T scored tokens, K listed tokens per position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from verl.errors import RolloutError

ROUNDING = 1e-3
"""By which a log-prob may be above 0, and the probabilities of a position above 1 together."""


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens whose log-probs are queried.

    Args:
        id: names the row in messages.
        token_ids: prompt and response.
        start: place of the first scored token; at least 1, because nothing predicts the first token of all.
        top_k: most likely tokens that are listed at each position; 0: none.
        temperature: logits are divided by it.
    """

    id: str
    token_ids: tuple[int, ...]
    start: int
    top_k: int = 0
    temperature: float = 1.0

    @property
    def scored(self) -> tuple[int, ...]:
        """The tokens (T,) whose log-probs are queried."""
        return self.token_ids[self.start :]


@dataclass(frozen=True)
class Scores:
    """An answer, in nats.

    Args:
        token_ids: the scored tokens as the model read them.
        log_probs: (T,) float32 of these.
        top_ids, top_log_probs: (T, K) int64 and float32, the listed tokens; None where none were queried.
    """

    token_ids: tuple[int, ...]
    log_probs: np.ndarray
    top_ids: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        token_ids: Iterable[int],
        log_probs: Sequence[object],
        listed: Sequence[Sequence[tuple[object, object]]] | None,
    ) -> Scores:
        """From the numbers of an answer.

        Args:
            listed: (id, log-prob) of the tokens of each position.

        Raises:
            TypeError, ValueError: something else than numbers, or positions with unequal numbers of tokens.
        """
        scores = cls(tuple(token_ids), numbers(log_probs))
        if listed is None:
            return scores
        lengths = {len(position) for position in listed}
        if len(lengths) > 1:
            raise ValueError(f"it lists {min(lengths)} tokens at one position and {max(lengths)} at another")
        shape = (len(listed), lengths.pop() if lengths else 0)
        ids = np.array([token for position in listed for token, _ in position], dtype=np.int64).reshape(shape)
        log_probs_listed = numbers([value for position in listed for _, value in position]).reshape(shape)
        return cls(scores.token_ids, scores.log_probs, ids, log_probs_listed)


def numbers(values: Sequence[object]) -> np.ndarray:
    """Float32 of a list of numbers.

    Raises:
        TypeError: one is null, a text or a truth value.
    """
    wrong = next((value for value in values if type(value) not in (int, float)), 0.0)
    if type(wrong) not in (int, float):
        raise TypeError(f"a log-prob of {wrong!r}".replace("None", "null"))
    return np.array(values, dtype=np.float32)


def check_score(request: ScoreRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse what a model cannot score.

    Raises:
        RolloutError: naming the field and what is allowed.
    """
    tokens, count = request.token_ids, len(request.token_ids)
    if not 1 <= request.start < count:
        raise RolloutError("no token is scored", key="start", got=request.start, allowed=f"1 to {count - 1}")
    if count > max_model_len:
        raise RolloutError("longer than the model's context", key="token_ids", got=count, allowed=f"{max_model_len}")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        bad = next(token for token in tokens if not 0 <= token < vocab_size)
        raise RolloutError("outside the vocabulary", key="token_ids", got=bad, allowed=f"0 to {vocab_size - 1}")
    if request.top_k < 0:
        raise RolloutError("not a number of tokens", key="top_k", got=request.top_k, allowed="0 or more")
    if not 0 < request.temperature < float("inf"):
        raise RolloutError("not a temperature", key="temperature", got=request.temperature, allowed="above 0, finite")


def invalid_scores(request: ScoreRequest, scores: Scores, vocab_size: int) -> str:
    """Why an answer cannot be the answer to this request; empty if it can.

    Args:
        vocab_size: of the model that reads the answer.
    """
    scored = request.scored
    if len(scores.token_ids) != len(scored) or len(scores.log_probs) != len(scored):
        return f"{len(scores.log_probs)} log-probs of {len(scores.token_ids)} tokens, where {len(scored)} were sent"
    other = next((n for n, (theirs, ours) in enumerate(zip(scores.token_ids, scored)) if theirs != ours), None)
    if other is not None:
        return f"response token {other} is {scores.token_ids[other]} there, and {scored[other]} was sent"
    if not request.top_k:
        return _invalid_log_prob(scores.log_probs)
    expected = min(request.top_k, vocab_size)
    ids, log_probs = scores.top_ids, scores.top_log_probs
    if ids is None or log_probs is None or ids.shape != (len(scored), expected):
        listed = 0 if ids is None else ids.shape[-1]
        return f"it lists {listed} tokens per position, where {expected} were queried"
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids.min() if ids.min() < 0 else ids.max()
        return f"it lists token {bad}, and the policy's vocabulary has {vocab_size}: another vocabulary"
    if (np.diff(np.sort(ids, axis=-1), axis=-1) == 0).any():
        return "it lists a token twice at one position"
    mass = np.exp(log_probs.astype(np.float64)).sum(-1).max()
    wrong = _invalid_log_prob(scores.log_probs) or _invalid_log_prob(log_probs)
    return wrong or (f"the listed tokens have a probability of {mass:.4g} together" if mass > 1 + ROUNDING else "")


def _invalid_log_prob(values: np.ndarray) -> str:
    wrong = values[~(np.isfinite(values) & (values <= ROUNDING))]
    return f"a log-prob of {wrong[0]}" if len(wrong) else ""

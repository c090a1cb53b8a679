"""What changes logits before the temperature: no end token in a response that is too short, and the repetition penalty.

Every row is changed by itself alone, and rows that ask for neither are not touched. Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.rollout.hf.rows import Row


class Adjustment:
    """Adjusts the logits of the running rows, and remembers the tokens that penalised rows have had."""

    def __init__(self) -> None:
        self._penalised: list[Row] = []
        self._places: torch.Tensor | None = None
        self._penalties: torch.Tensor | None = None
        self._had: torch.Tensor | None = None
        self._rows: list[Row] = []

    def __call__(self, rows: list[Row], logits: torch.Tensor) -> torch.Tensor:
        """The logits that the next tokens are drawn from; the same tensor where no row asks for a change.

        Args:
            logits: (R, V); left as they are.
        """
        if rows is not self._rows and rows != self._rows:
            self._seat(rows, logits)
        too_short = [i for i, row in enumerate(rows) if row.stops and not row.may_end]
        if not too_short and self._had is None:
            return logits
        adjusted = logits.to(torch.float32, copy=True)
        for i in too_short:
            adjusted[i, [token for token in rows[i].stops if token < logits.shape[1]]] = float("-inf")
        if self._had is not None:
            assert self._places is not None and self._penalties is not None
            theirs, penalties = adjusted[self._places], self._penalties[:, None]
            penalised = torch.where(theirs > 0, theirs / penalties, theirs * penalties)
            adjusted[self._places] = torch.where(self._had, penalised, theirs)
        return adjusted

    def drew(self, tokens: torch.Tensor) -> None:
        """These (R,) tokens were drawn, one for each row of the last call."""
        if self._had is not None:
            self._had.scatter_(1, tokens[self._places][:, None], True)

    def _seat(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """Keep the state of rows that continue, and scan the tokens of new ones."""
        before, had = {row: i for i, row in enumerate(self._penalised)}, self._had
        self._rows = list(rows)
        places = [i for i, row in enumerate(rows) if row.request.sampling.repetition_penalty != 1]
        self._penalised, self._had = [rows[i] for i in places], None
        if not places:
            return
        device = logits.device
        self._places = torch.tensor(places, device=device)
        penalties = [row.request.sampling.repetition_penalty for row in self._penalised]
        self._penalties = torch.tensor(penalties, dtype=torch.float32, device=device)
        self._had = torch.zeros(len(places), logits.shape[1], dtype=torch.bool, device=device)
        for i, row in enumerate(self._penalised):
            if had is not None and row in before:
                self._had[i] = had[before[row]]
            else:
                seen_ids = sorted({*row.prompt.token_ids, *row.tokens})
                self._had[i, torch.tensor(seen_ids, device=device)] = True

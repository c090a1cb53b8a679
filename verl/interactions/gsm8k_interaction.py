"""A user who tells a model whether its answer to a grade-school problem is right, and asks again until it is."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from verl.interactions.base import BaseInteraction
from verl.tools.gsm8k_tool import same_number


class Gsm8kInteraction(BaseInteraction):
    """Ends the conversation at a right answer; a row gives ``interaction_kwargs: {ground_truth: ...}``.

    What the user says in either case is ``config.right`` and ``config.wrong``.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config)
        self._truths: dict[str, str] = {}
        self._scores: dict[str, float] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        if ground_truth is None:
            raise ValueError("the row gives no interaction_kwargs.ground_truth")
        name = instance_id or str(uuid.uuid4())
        self._truths[name], self._scores[name] = str(ground_truth), 0.0
        return name

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        answer = next((str(m["content"]) for m in reversed(messages) if m["role"] == "assistant"), "")
        is_right = same_number(answer, self._truths[instance_id])
        self._scores[instance_id] = float(is_right)
        if is_right:
            return True, str(self.config.get("right", "Your answer is right.")), 1.0, {}
        return False, str(self.config.get("wrong", "Your answer is wrong. Think again and answer anew.")), 0.0, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return self._scores[instance_id]

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._truths.pop(instance_id, None)
        self._scores.pop(instance_id, None)

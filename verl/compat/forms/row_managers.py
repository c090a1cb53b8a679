"""The built-in managers in the form that scores one row with ``async run_single``, for subclasses of users."""

from __future__ import annotations

from typing import Any

from verl.protocol import DataProto
from verl.rewards.managers import dapo, gdpo, naive
from verl.rewards.managers.loop import RewardManagerBase
from verl.rewards.managers.rows import read_rows


class NaiveRowManager(RewardManagerBase):
    """`verl.rewards.managers.naive` for one row; subclass it and change what ``run_single`` returns."""

    of: Any = naive.NaiveRewardManager
    key = "data_source"

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """The score of the function and its other values.

        Raises:
            RuntimeError: the function failed.
        """
        manager = self._manager()
        result = await manager.result_of_row(data)
        if result.failure is None:
            (row,) = read_rows(data, self.tokenizer, self.key, None)
            result = manager.adjust(row, result)
        if result.failure is not None:
            raise RuntimeError(result.failure.message)
        return {"reward_score": result.score, "reward_extra_info": result.extra}

    def _manager(self) -> Any:
        if not hasattr(self, "_rows"):
            self._rows = self.of(self.tokenizer, 0, self.compute_score, self.key, **self.arguments())
        return self._rows

    def arguments(self) -> dict[str, Any]:
        """Those of the manager beyond the function."""
        return {}


class DAPORowManager(NaiveRowManager):
    """Adds ``acc`` and the overlong penalty of ``reward.reward_kwargs``."""

    of = dapo.DAPORewardManager

    def arguments(self) -> dict[str, Any]:
        kwargs = self.config.reward.reward_kwargs
        return {name: kwargs[name] for name in ("max_resp_len", "overlong_buffer_cfg") if name in kwargs}


class GDPORowManager(NaiveRowManager):
    """Wants rewards with names, those of ``algorithm.gdpo_reward_keys``."""

    of = gdpo.GDPORewardManager

    def arguments(self) -> dict[str, Any]:
        return {"config": self.config}

"""The manager that scores row by row, in the asynchronous form and under upstream's newer path."""

from typing import Any

from verl.protocol import DataProto
from verl.rewards.managers import naive
from verl.rewards.managers.loop import RewardManagerBase
from verl.rewards.managers.rows import read_rows


class NaiveRewardManager(RewardManagerBase):
    """`verl.rewards.managers.naive` for one row; subclass it and change what ``run_single`` returns."""

    of: Any = naive.NaiveRewardManager
    key = "data_source"

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """The score of the function and what it said beside it.

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

"""DAPO's manager in the asynchronous form, under upstream's newer path."""

from typing import Any

from verl.experimental.reward_loop.reward_manager import naive
from verl.rewards.managers import dapo


class DAPORewardManager(naive.NaiveRewardManager):
    """Adds ``acc`` and the overlong penalty of ``reward.reward_kwargs``."""

    of = dapo.DAPORewardManager

    def arguments(self) -> dict[str, Any]:
        given = self.config.reward.reward_kwargs
        return {name: given[name] for name in ("max_resp_len", "overlong_buffer_cfg") if name in given}

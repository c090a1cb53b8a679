"""An agent loop of a user's own that says in which process it ran, and goes wrong where its row wants it."""

from __future__ import annotations

import asyncio
import os

from verl.agent_loop import AgentLoopBase, AgentLoopOutput


class Moody(AgentLoopBase):
    """One turn; a column ``mood`` makes it fail, or ask again and again or wait until the batch gives it up."""

    async def run(self, sampling_params, **row):
        class Strange(Exception):
            """A type that no other process knows."""

        if row["mood"] == "fails":
            raise Strange("no mood for it")
        prompt, mine = await self.prompt_ids(row), {"process": os.getpid()}
        done = await self.server_manager.generate(row["uid"], prompt_ids=prompt, sampling_params=sampling_params)
        while row["mood"] == "endless" and done.finish_reason != "abort":
            await asyncio.sleep(0.01)
            done = await self.server_manager.generate(row["uid"], prompt_ids=prompt, sampling_params=sampling_params)
        while row["mood"] == "waits" and not self.server_manager.stop.is_set:
            await asyncio.sleep(0.01)
        ids, log_probs = list(done.token_ids), list(done.log_probs)
        versions, reason = list(done.token_versions), "abort" if row["mood"] == "waits" else done.finish_reason
        return AgentLoopOutput(prompt, ids, [1] * len(ids), log_probs, finish_reason=reason,
                               token_versions=versions, extra_fields=mine, num_turns=2)  # fmt: skip

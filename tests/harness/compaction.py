"""An agent that now and then compacts its context: an agent loop of a user's that returns several trajectories."""

from __future__ import annotations

from pathlib import Path

from verl.agent_loop import AgentLoopBase, AgentLoopOutput

LOOPS = "- {name: compacting, _target_: tests.harness.compaction.Compacting}\n"
WORDS = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=compacting",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
)


def write_loops(folder: Path) -> None:
    """The file that `WORDS` name."""
    (folder / "loops.yaml").write_text(LOOPS)


class Compacting(AgentLoopBase):
    """Two tokens; then, unless the first has an odd number, three more in a context that has only the second one.

    The score is the share of letters among the first tokens of the trajectories.
    """

    async def run(self, sampling_params, **row):
        prompt = await self.prompt_ids(row)
        first = await self.turn(row, prompt, {**sampling_params, "max_tokens": 2})
        made = [first]
        if first.response_ids[0] % 2 == 0:
            prompt = [*prompt[:3], first.response_ids[-1]]
            made.append(await self.turn(row, prompt, {**sampling_params, "max_tokens": 3}))
        texts = [self.tokenizer.decode(one.response_ids[:1]) for one in made]
        made[-1].reward_score = sum(text.isascii() and text.isalpha() for text in texts) / len(texts)
        return made

    async def turn(self, row, prompt, parameters):
        done = await self.server_manager.generate(row["uid"], prompt_ids=prompt, sampling_params=parameters)
        ids = list(done.token_ids)
        return AgentLoopOutput(
            list(prompt),
            ids,
            [1] * len(ids),
            list(done.log_probs),
            token_versions=list(done.token_versions),
            finish_reason=done.finish_reason,
            num_turns=2,
        )

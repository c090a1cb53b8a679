"""Runs the loop of one row over a sampler: from a row of prompts to its trajectory."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.batch import MOST_RESPONSES, MOST_TRAJECTORIES, SEVERAL_WITH_PICTURES, in_one
from verl.agent_loop.choose import LoadedLoop, LoopLoader
from verl.agent_loop.client import SamplerClient
from verl.agent_loop.early_stop import Stop
from verl.agent_loop.failed import RunStops, failed
from verl.agent_loop.row_traces import RowTraces
from verl.agent_loop.seen import SeenImages
from verl.agent_loop.unfinished import EARLIER
from verl.config.schema.data import DataConfig
from verl.config.schema.rollout import RolloutConfig
from verl.data.vision.videos import VideoLimits
from verl.errors import ConfigError, NotBuiltError, ReplayError, RolloutError
from verl.metrics import notice
from verl.protocol.tokenizer import Tokenizer
from verl.rollout.base import Sampler
from verl.rollout.lost import EngineLostError

if TYPE_CHECKING:
    from verl.data.vision.processor import VisionProcessor

Score = Callable[[dict[str, Any], AgentLoopOutput], Awaitable[float]]


class RunnerLostError(RolloutError):
    """The process that ran the loop of a row is gone."""


class RunsRows(Protocol):
    """What runs the loops of rows, in this process or another; `RunnerLostError` says that it does so no more."""

    async def run(
        self, number: int, row: dict[str, Any], stream: tuple[str, int], parameters: dict[str, Any], stop: Stop
    ) -> AgentLoopOutput: ...

    async def end(self, stop: Stop) -> None:
        """Tell the loops of a batch, as far as they do not see its ``stop``, that it is about to be set."""


class RowRunner:
    """Runs the loops of rows in this process; many at once, each a coroutine.

    Args:
        config: the ``rollout`` section.
        sampler: serves the requests.
        tokenizer, processor: of the policy.
        score: ``await score(row, output)``, for a trajectory whose loop knows no score.
        data_config: for loops that render messages as the dataset does.
    """

    def __init__(
        self,
        config: RolloutConfig,
        sampler: Sampler,
        tokenizer: Tokenizer,
        processor: VisionProcessor | None = None,
        score: Score | None = None,
        data_config: DataConfig | None = None,
    ):
        self.config, self.sampler, self.score = config, sampler, score
        self.tokenizer, self.processor, self.data_config = tokenizer, processor, data_config
        self.loops = LoopLoader(config, tokenizer, data_config)
        self.limits = VideoLimits.of(data_config)
        self.traces = RowTraces.of(config, tokenizer)
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
        self.pad = int(next((number for number in ids if number is not None), 0))

    async def run(
        self, number: int, row: dict[str, Any], stream: tuple[str, int], parameters: dict[str, Any], stop: Stop
    ) -> AgentLoopOutput:
        """The trajectory of a row; one whose loop failed is masked.

        Args:
            number: of the row in its batch, for messages.
            stream: uid and sample index, the key of its random numbers.
            parameters: how it is sampled.
            stop: once it is set, requests come back empty. Where it keeps what is not done, that of a loop which
                cannot resume later is waited for.

        Raises:
            RunStops: the failure is not the row's alone, because the configuration is wrong, or its loop says so.
            RolloutError: the sampler is gone.
        """
        if self.traces is None:
            return await self._run(number, row, stream, parameters, stop)
        return await self.traces.run(row, parameters, lambda its: self._run(number, its, stream, parameters, stop))

    async def _run(
        self, number: int, row: dict[str, Any], stream: tuple[str, int], parameters: dict[str, Any], stop: Stop
    ) -> AgentLoopOutput:
        chosen, state = self.loops.of(row), row.get(EARLIER)
        row = {name: value for name, value in row.items() if name != EARLIER}
        waits = stop.keeps and not chosen.loop_class.resumable
        budget = int(self.config.response_length)
        end = self.tokenizer.eos_token_id
        ends = () if end is None else (int(end),)
        its_stop = Stop() if waits else stop
        seen = SeenImages(self.processor, row, self.limits)
        client = SamplerClient(
            self.sampler, *stream, self.config.seed, budget, ends, its_stop, goes_on=waits, seen=seen
        )
        if state is not None:
            client.go_on(state)
        where = place_of_row(number, row, stream)
        try:
            loop = chosen.make(self.config, client, self.tokenizer, self.processor, self.data_config)
            loop.unfinished = None if state is None else state["loop"]
            output = self._row(await loop.run(dict(parameters), **{**row, "uid": stream[0]}), chosen, where)
            output.metrics.generate_sequences = client.seconds
            if seen.added and output.multi_modal_data is None:
                output.multi_modal_data = {"images": seen.images, "videos": seen.videos}
                output.multi_modal_inputs = seen.inputs
            output.unfinished = None if client.left is None else client.state(output.unfinished)
            if self.score is not None and output.reward_score is None and output.unfinished is None:
                start = time.perf_counter()
                output.reward_score = float(await self.score(row, output))
                output.metrics.compute_score += time.perf_counter() - start
        except ReplayError:
            raise  # it ends the run
        except (ConfigError, EngineLostError, RunStops) as error:
            kind = RolloutError if isinstance(error, EngineLostError) else RunStops
            raise kind(f"the agent loop {chosen} failed on {where}: {type(error).__name__}: {error}") from error
        except Exception as error:  # boundary: a user's loop or scorer; the row is masked, the first error shown
            return failed(self._nothing(row), f"the agent loop {chosen}", error, "mask", where)
        return output

    async def end(self, stop: Stop) -> None:
        """Its loops see the ``stop`` itself."""

    def _row(
        self, made: AgentLoopOutput | Sequence[AgentLoopOutput], chosen: LoadedLoop, where: str
    ) -> AgentLoopOutput:
        """What a loop returned, as one row. Of too many trajectories the last alone is trained on, with its score."""
        length = int(self.config.response_length)
        output = in_one(made, length, int(self.config.prompt_length))
        if output.before and self.processor is not None:
            fix = "Return one, or train a model that has no processor of pictures."
            raise NotBuiltError(SEVERAL_WITH_PICTURES, fix=fix)
        count = sum(len(one.response_ids) for one in (*output.before, output))
        if len(output.before) < MOST_TRAJECTORIES and count <= MOST_RESPONSES * length:
            return output
        many = f"{len(output.before) + 1} trajectories with {count} tokens, more than {MOST_TRAJECTORIES} trajectories "
        many += f"or {MOST_RESPONSES} times data.max_response_length = {length} tokens"
        if chosen.kwargs.get("on_error") == "raise":
            raise RunStops(many)
        notice(f"trajectories of the agent loop {chosen}", f"on {where} {many}: the last alone is trained on")
        dropped = sum(sum(one.response_mask) for one in output.before)
        output.measures.add("rollout/agent/dropped_tokens", float(dropped), "sum")
        return replace(output, before=())

    def _nothing(self, row: Mapping[str, Any]) -> AgentLoopOutput:
        """The output of a row whose loop gave none: its prompt, if it is known in tokens, and no response."""
        ids = row.get("raw_prompt_ids")
        prompt = [self.pad] if ids is None or not len(ids) else [int(token) for token in ids]
        return AgentLoopOutput(prompt, [], [], response_logprobs=[], token_versions=[], num_turns=1)


def place_of_row(number: int, row: Mapping[str, Any], stream: tuple[str, int]) -> str:
    """Where a row stands, in words that a person can look up."""
    extra = row.get("extra_info")
    index = extra.get("index") if isinstance(extra, Mapping) else None
    return f"row {number} of the batch, uid {stream[0]}" + ("" if index is None else f", extra_info.index {index}")

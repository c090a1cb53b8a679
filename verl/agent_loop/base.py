"""The contract of an agent loop: what it is given, and the trajectory it returns.

A loop works in tokens: what it returns as sampled tokens is what the sampler returned, and the trainer trains on
exactly these. Text that it inserts (tool answers, user turns) goes in as tokens with mask 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from verl.config.schema.data import DataConfig
from verl.config.schema.rollout import RolloutConfig
from verl.data.chat_template import ChatTemplate
from verl.data.messages import MEDIA, as_messages
from verl.data.vision.parts import bare, media_parts
from verl.errors import DataError
from verl.metrics import MetricSet
from verl.protocol.tokenizer import Tokenizer
from verl.registry import AGENT_LOOPS

if TYPE_CHECKING:
    from verl.data.vision.processor import VisionProcessor

L = TypeVar("L", bound="type[AgentLoopBase]")


@dataclass
class AgentLoopMetrics:
    """Seconds a trajectory spent: sampling, in tools, being scored; and how often its requests were preempted."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass
class AgentLoopOutput:
    """One trajectory.

    Args:
        prompt_ids: what the first request was given.
        response_ids: everything after it, in order: sampled tokens and inserted ones.
        response_mask: 1 on sampled tokens, 0 on inserted ones.
        response_logprobs: of sampled tokens as the sampler drew them, 0 on inserted ones; None if the sampler has none.
        token_versions: version of the weights that drew each token, -1 on inserted ones.
        routed_experts: (tokens, layers, top_k) array: the experts of the first tokens of prompt and response, at most
            all of them; None if nothing recorded them.
        multi_modal_data, multi_modal_inputs: the images and videos of all turns and what the processor made of them,
            where there are more than the row's; None leaves these.
        reward_score: a score that the loop already knows.
        step_rewards: (place in the response, reward) of each step, where it is not one score at the end; its sum is
            ``reward_score``.
        num_turns: messages after the system prompt: user turns and answers.
        finish_reason: why the last request ended: stop, length or abort.
        extra_fields: further values of this row; each becomes a column of the batch, as ``loop_<name>`` where
            the run has one of that name.
        measures: metrics of this trajectory; over the batch each is reduced its own way.
        failure: the exception of a trajectory that failed; it stays in this process.
        unfinished: what the loop keeps of a trajectory that resumes in a later batch (`AgentLoopBase.resumable`).
        before: earlier trajectories of the same sample, where its loop returned several; the run fills it in.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_output: Any = None
    multi_modal_inputs: Mapping[str, Any] | None = None
    token_versions: list[int] | None = None
    finish_reason: str = "stop"
    measures: MetricSet = field(default_factory=MetricSet)
    step_rewards: list[tuple[int, float]] | None = None
    failure: Exception | None = None
    unfinished: Any = None
    before: Sequence[AgentLoopOutput] = ()

    def __post_init__(self) -> None:
        if isinstance(self.metrics, Mapping):
            self.metrics = AgentLoopMetrics(**self.metrics)


class LoopConfig:
    """A loop's settings by the keys of the configuration, ``actor_rollout_ref.rollout`` and ``data``.

    Settings of the ``rollout`` section are attributes of it, too.
    """

    def __init__(self, rollout: RolloutConfig, data: DataConfig | None):
        self.actor_rollout_ref, self.data = SimpleNamespace(rollout=rollout), data

    @classmethod
    def of(cls, config: RolloutConfig, data: DataConfig | None) -> Any:
        """Of the ``rollout`` section; a whole configuration has these keys as it is."""
        return config if config is None or hasattr(config, "actor_rollout_ref") else cls(config, data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "actor_rollout_ref":
            raise AttributeError(name)  # a copy in the making has no section yet
        return getattr(self.actor_rollout_ref.rollout, name)


class AgentLoopBase(ABC):
    """Runs one trajectory; a fresh instance per row.

    Attributes:
        resumable: `run` can resume a trajectory in a later batch (``rollout.keep_unfinished``). Once a batch has
            enough, an answer is aborted, ``server_manager.left`` is set, and `run` returns what it has; what it needs
            besides that answer, as plain data, is ``unfinished`` of its output. The later `run` has it in
            ``self.unfinished``, and its first request continues that answer. Other loops are waited for.

    Args:
        trainer_config: the configuration that the run was started with, or its ``rollout`` section.
        server_manager: the sampler as this trajectory sees it (`SamplerClient`).
        tokenizer, processor: of the policy.
        dataset_cls, data_config: for loops that render messages as the dataset does.
        shared: what `prepare` returned; None prepares it for this trajectory alone.
        kwargs: further keys of a YAML entry of ``agent_loop_config_path``, without name and class; kept as attributes.

    Example:
        >>> @register("my_agent")
        ... class MyLoop(AgentLoopBase):
        ...     async def run(self, sampling_params, **row):
        ...         prompt = await self.prompt_ids(row)
        ...         generate = self.server_manager.generate
        ...         answer = await generate(row["uid"], prompt_ids=prompt, sampling_params=sampling_params)
        ...         return AgentLoopOutput(prompt, list(answer.token_ids), [1] * len(answer.token_ids))
    """

    resumable: ClassVar[bool] = False
    unfinished: Any = None

    def __init__(
        self,
        trainer_config: RolloutConfig,
        server_manager: Any,
        tokenizer: Tokenizer,
        processor: VisionProcessor | None = None,
        dataset_cls: type | None = None,
        data_config: DataConfig | None = None,
        hf_model_type: str | None = None,
        shared: Any = None,
        **kwargs: Any,
    ):
        self.config, self.server_manager = LoopConfig.of(trainer_config, data_config), server_manager
        self.rollout_config = None if self.config is None else self.config.actor_rollout_ref.rollout
        self.tokenizer, self.processor = tokenizer, processor
        self.dataset_cls, self.data_config, self.hf_model_type = dataset_cls, data_config, hf_model_type
        self.shared = self.prepare(trainer_config, tokenizer, data_config, **kwargs) if shared is None else shared
        vars(self).update(kwargs)

    @classmethod
    def prepare(
        cls, config: RolloutConfig, tokenizer: Tokenizer, data_config: DataConfig | None = None, **kwargs: Any
    ) -> Any:
        """What all trajectories of this class share (tools, parsers); made once per process, before the first row.

        Args:
            config: the ``rollout`` section.
            kwargs: further keys of a YAML entry, without name and class.
        """
        return None

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | Sequence[AgentLoopOutput]:
        """The trajectory of one row, or several: before and after a compaction, or of sub-agents.

        Several are rows of the training batch, with the score of the last one: it is the sample's answer.

        Args:
            sampling_params: temperature, top_p, top_k, max_tokens, ...; passed on with every request.
            kwargs: the row: raw_prompt, raw_prompt_ids, uid, and every other column of the data.
        """

    async def process_vision_info(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """``{"images": [PIL.Image, ...], "videos": [VideoClip, ...]}`` of the messages, in order, without empty lists.

        A part that only says that there is one is of those that the trajectory has seen, in order.

        Raises:
            DataError: there are more such parts than it has seen, or an image or a video is broken.
            NotBuiltError: a part that is a sound, or a file that no installed package reads.
        """
        parts = list(media_parts(as_messages(list(messages), lambda: "messages", media=MEDIA)))
        seen = self.server_manager.seen
        waiting, loaded = {"image": iter(seen.images), "video": iter(seen.videos)}, dict[str, list[Any]]()
        for part in parts:
            kind = part["type"]
            of_kind = loaded.setdefault(f"{kind}s", [])
            if kind not in part:
                of_kind.append(next(waiting[kind], None))
                if of_kind[-1] is None:
                    raise DataError(f"the messages have more {kind}s than the trajectory", key="messages")
                continue
            load = seen.load if kind == "image" else seen.load_videos
            of_kind += load([part[kind]], "messages", first=len(of_kind))
        return loaded

    async def apply_chat_template(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Messages -> token ids that end where the assistant's answer begins; special tokens in them are text.

        Args:
            kwargs: further arguments of the template; ``images`` and ``videos`` are those of the messages, else the
                trajectory's.
        """
        template = ChatTemplate(self.tokenizer)
        aside = ("tokenize", "return_dict", "images", "videos")
        options = {name: value for name, value in kwargs.items() if name not in aside}
        text = template.prompt(bare(messages), **options)
        ids = template.encode(text)
        if not any(True for _ in media_parts(messages)):
            return ids
        return self.server_manager.seen.prompt(ids, kwargs.get("images"), kwargs.get("videos"))

    async def prompt_ids(self, row: dict[str, Any]) -> list[int]:
        """The row's prompt: as the dataset tokenised and truncated it, else from its messages."""
        if row.get("raw_prompt_ids") is not None:
            return [int(token) for token in row["raw_prompt_ids"]]
        if row.get("raw_prompt") is None:
            raise DataError("a row has neither 'raw_prompt_ids' nor 'raw_prompt'", got=sorted(row))
        return await self.apply_chat_template(row["raw_prompt"])


def register(agent_name: str) -> Callable[[L], L]:
    """Put a loop under a name that a row's ``agent_name`` or ``rollout.agent.default_agent_loop`` can use."""
    return AGENT_LOOPS.register(agent_name)

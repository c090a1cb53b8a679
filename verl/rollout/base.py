"""The contract of every sampler: token ids in, token ids and the log-probs they were sampled with out.

Nothing here knows a backend. A request carries everything its result may depend on; what else is in the batch, and in
which order requests finish, may change when an answer arrives but never which tokens it holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from verl.config.schema.node import key_of
from verl.config.schema.rollout import RolloutConfig
from verl.errors import NotBuiltError, RolloutError
from verl.rollout.scores import ScoreRequest, Scores
from verl.weight_sync.chunks import WeightChunk

FinishReason = Literal["stop", "length", "abort"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")
GREEDY_TEMPERATURE = 1e-5
"""A temperature below this is greedy: dividing by it would only amplify rounding."""
LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")
"""Which log-probs a sampler reports: of the distribution that it draws from, or of the model's logits as they are
(temperature 1, no penalty, nothing left out)."""
PICTURE_FIELDS = ("images", "videos", "multi_modal_inputs")
"""Fields of a request that hold its images and videos: as pictures, and as the model's processor made them."""
SMALLEST_TEMPERATURE = 1e-30
"""Logits divided by a smaller one are not finite in float32."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn.

    They apply in this order: ``min_tokens``, ``repetition_penalty``, temperature, ``top_k``, ``top_p`` (of what top-k
    left), then the rest is renormalised. Reported log-probs are those of this final distribution, unless the sampler
    was made to report raw ones (`LOGPROBS_MODES`).

    Args:
        temperature: logits are divided by it; 0 is greedy.
        top_p: the smallest set of tokens whose probability reaches it is kept; 1 keeps all.
        top_k: that many most probable tokens are kept; -1 (or 0) keeps all. Ties with the last one stay.
        max_tokens: budget of the response in tokens, ``Request.generated_prefix`` included.
        min_tokens: no end token, of the model or of ``stop_token_ids``, is among the first that many tokens of the
            response, ``Request.generated_prefix`` included: its probability is 0 there.
        repetition_penalty: logits of tokens that the prompt or the response so far has are divided by it where they
            are positive and multiplied by it where not (Keskar et al., arXiv 1909.05858); 1 changes nothing.
        stop_token_ids: each of these ends the response and is its last token, like the model's own end tokens.
        ignore_eos: no token ends the response, neither the model's own nor these; only the budget does.
        do_sample: False is greedy. A greedy token's log-prob is that of the unfiltered distribution at ``temperature``
            (at 1 where the temperature is 0).
        seed: first part of the key of the random numbers.

    Example:
        >>> SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256, stop_token_ids=(2,))
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    do_sample: bool = True
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return not self.do_sample or self.temperature < GREEDY_TEMPERATURE

    @property
    def is_plain(self) -> bool:
        """Whether the distribution that is drawn from is the model's own, so that raw log-probs are processed ones."""
        unfiltered = self.top_p == 1 and self.top_k < 1
        return self.temperature == 1 and unfiltered and self.is_unadjusted

    @property
    def is_unadjusted(self) -> bool:
        """Whether logits stay as they are before the temperature."""
        return self.repetition_penalty == 1 and (self.min_tokens == 0 or self.ignore_eos)


@dataclass(frozen=True)
class Request:
    """One response to be sampled.

    Args:
        id: unique among the requests in flight.
        token_ids: the prompt.
        sampling: how to draw.
        uid: second part of the key of the random numbers: the prompt's identity, the same for its n samples.
        sample_index: third part: which of the n samples of ``uid`` this is.
        images, videos: pictures (``PIL.Image``) and `VideoClip` mappings, in the order of their placeholders, for
            samplers that run their processor themselves (vLLM, SGLang, servers); None for text.
        multi_modal_inputs: the same as the model's processor made them for this prompt alone (``pixel_values``,
            ``image_grid_thw``, ...), for samplers that call the model itself (`hf`). ``token_ids`` holds as many
            placeholders as the images have features. Requests for one prompt share the object.
        generated_prefix: response tokens from an earlier, interrupted attempt. They are continued exactly as if there
            had been no interruption, and are not part of the completion.
        priority: the smaller goes first among waiting requests; equal ones in order of arrival.
        session: requests of one conversation share it; where there are several replicas, they go to the same one.

    Example:
        >>> Request("step3-17", token_ids=(1, 15, 7), sampling=SamplingParams(max_tokens=8), uid="row5", sample_index=2)
    """

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    uid: str = ""
    sample_index: int = 0
    images: Sequence[Any] | None = None
    videos: Sequence[Any] | None = None
    multi_modal_inputs: Mapping[str, Tensor] | None = None
    generated_prefix: tuple[int, ...] = ()
    priority: int = 0
    session: str = ""

    @property
    def sees(self) -> bool:
        """Whether the prompt has images or videos."""
        return bool(self.images or self.videos or self.multi_modal_inputs)


@dataclass(frozen=True)
class Completion:
    """The result of a request; all lists have one entry per new token, including the stop token.

    Example:
        >>> Completion("a", (7, 2), (-0.1, -0.02), "stop", (3, 3))

    Args:
        log_probs: of each token under the distribution it was drawn from.
        finish_reason: ``stop`` (a stop token), ``length`` (the budget), ``abort`` (partial, see `Sampler.abort`).
        token_versions: version of the weights that each token was drawn with.
        routed_experts: (tokens, layers, top_k) int16 array, where the sampler was made to report them: the experts of
            each token of the prompt, of the prefix and of these, but of the last one, which went through no pass.
        num_preempted: how often the request lost its place and was computed again.
        is_interrupted: new weights aborted it, so it is to be resumed (`verl.rollout.resume`).
    """

    request_id: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    token_versions: tuple[int, ...]
    routed_experts: Any = None
    num_preempted: int = 0
    is_interrupted: bool = False


Moved = tuple[str, int, int]
"""A request that resumes at another replica: its uid, its sample index, and the tokens of its response so far."""


class Sampler(ABC):
    """Samples completions; batches concurrent `generate` calls.

    All methods belong to one event loop at a time. They may be used from one loop after another (a run that calls
    ``asyncio.run`` once per step), never from two at once.

    Attributes:
        at_update: what `update_weights` does to running requests: ``wait``, ``pause`` or ``abort``.
        logprobs_mode: which log-probs it reports, one of `LOGPROBS_MODES`.
        shares_base: the weights under an adapter may be a trainer's, in this process; they come before the adapter.
        computes_in_loop: the event loop that it is used from does nothing else during a forward pass.
        picture_fields: what it reads of a request's images; the rest need not be sent to its process.
    """

    computes_in_loop: ClassVar[bool] = False
    picture_fields: tuple[str, ...] = PICTURE_FIELDS
    shares_base: bool = False
    at_update: str = "wait"
    logprobs_mode = LOGPROBS_MODES[0]

    @classmethod
    def why_adapter_is_merged(cls, rollout: RolloutConfig) -> str:
        """Why a LoRA adapter must be merged into the weights that are sent here; empty if it may come alone.

        Args:
            rollout: section of the configuration.
        """
        return "this engine takes whole weights only"

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights in use."""

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Cancelling the caller frees what the request holds.

        Raises:
            RolloutError: the request is invalid (see `check_request`), the sampler sleeps, or its weights are unusable.
        """

    async def score(self, request: ScoreRequest) -> Scores:
        """Log-probs of given tokens; nothing is sampled.

        Raises:
            NotBuiltError: this engine gives none.
            RolloutError: the request is invalid (see `check_score`), or as `generate` raises it.
        """
        raise NotBuiltError(f"{type(self).__name__} gives no log-probs of given tokens", fix="Take the hf engine.")

    @abstractmethod
    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Take new weights once no request runs; waiting ones start with the new version.

        With ``at_update="wait"`` running requests end first, so that no completion mixes versions. Otherwise they stop
        between two forward passes, each with at least one token more than after the previous update. What they
        resume with prefills their tokens so far again: no pass reads a KV cache that other weights filled.
        """

    def interrupt_pass(self) -> None:  # noqa: B027 -- most samplers compute elsewhere than in their loop
        """From any thread: an update will be in the event loop at once, and may interrupt the forward pass in work."""

    async def confirm(self, version: int) -> int:
        """The version in use, queried after ``version`` was sent, perhaps by another process."""
        return self.version

    async def drawn(self, known: Mapping[str, int]) -> dict[str, Completion]:
        """What requests in flight have drawn that the caller does not have, as far as the engine says so.

        Args:
            known: id of a request -> tokens of its response that the caller has, with the prefix that it came with.

        Returns:
            Id -> the tokens behind these, with log-probs and versions, of requests that have more.
        """
        return {}

    @abstractmethod
    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """End these requests (all, if None) now with what they have; returns how many there were."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Free memory between phases: 1 the KV cache, 2 the weights as well."""

    @abstractmethod
    async def wake(self) -> None:
        """Undo `sleep`; after level 2 the weights must arrive by `update_weights` before anything is sampled."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters since the start: ``forward_tokens``, ``steps`` and what else the backend counts."""


def check_request(request: Request, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse what can only be a mistake, before anything is computed.

    Args:
        vocab_size: token ids are below it.
        max_model_len: longest sequence (prompt and response) of the model.

    Raises:
        RolloutError: naming the field, what it was and what is allowed.
    """
    check_sampling(request.sampling, vocab_size)
    if not request.token_ids:
        raise RolloutError("the prompt is empty", key="token_ids", fix="A prompt needs at least one token.")
    tokens = (*request.token_ids, *request.generated_prefix)
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        bad = next(t for t in tokens if not 0 <= t < vocab_size)
        raise RolloutError(
            f"token id outside the vocabulary in request {request.id!r}",
            key="token_ids",
            got=bad,
            allowed=f"0 to {vocab_size - 1}",
            fix="Do tokenizer and model belong together?",
        )
    if len(request.generated_prefix) >= request.sampling.max_tokens:
        raise RolloutError(
            "the generated prefix uses up the whole budget",
            key="generated_prefix",
            got=len(request.generated_prefix),
            allowed=f"fewer than max_tokens={request.sampling.max_tokens}",
        )
    total = len(request.token_ids) + request.sampling.max_tokens
    if total > max_model_len:
        raise RolloutError(
            f"prompt ({len(request.token_ids)} tokens) and response budget ({request.sampling.max_tokens}) are longer "
            "than the model's context",
            key="max_tokens",
            got=total,
            allowed=f"at most {max_model_len}",
            fix="Lower prompt_length or response_length of the rollout section (in training they follow "
            "data.max_prompt_length and data.max_response_length), or raise its max_model_len if it is set.",
        )
    if request.sample_index < 0:
        raise RolloutError("a sample index counts from 0", key="sample_index", got=request.sample_index)


def check_context(rollout: RolloutConfig, max_model_len: int) -> None:
    """Refuse lengths of prompts and responses that are more tokens together than the sampler's context.

    Args:
        rollout: the section, with ``prompt_length`` and ``response_length``.
    """
    if rollout.prompt_length + rollout.response_length > max_model_len:
        raise RolloutError(
            f"a prompt of {rollout.prompt_length} tokens and its response are longer than the sampler's context",
            key=key_of(rollout, "response_length"),
            got=rollout.response_length,
            allowed=f"{max_model_len} tokens for both",
            fix=f"Lower it or {key_of(rollout, 'prompt_length')}. "
            "In training they are data.max_response_length and data.max_prompt_length.",
        )


def check_logprobs_mode(mode: str) -> str:
    """The mode, if there is such a one.

    Raises:
        RolloutError: there is none.
    """
    if mode not in LOGPROBS_MODES:
        raise RolloutError("unknown value", key="logprobs_mode", got=mode, allowed=LOGPROBS_MODES)
    return mode


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse settings that describe no distribution."""
    if sampling.max_tokens < 1:
        raise RolloutError("there is nothing to sample", key="max_tokens", got=sampling.max_tokens, allowed="1 or more")
    temperature = sampling.temperature
    if temperature != 0 and not SMALLEST_TEMPERATURE <= temperature < float("inf"):
        raise RolloutError(
            "not a temperature",
            key="temperature",
            got=temperature,
            allowed=f"0 (greedy), or {SMALLEST_TEMPERATURE:g} or more, finite",
        )
    if not 0 < sampling.top_p <= 1:
        raise RolloutError("not a probability mass", key="top_p", got=sampling.top_p, allowed="above 0, at most 1")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise RolloutError(
            "no minimum length that a response can have",
            key="min_tokens",
            got=sampling.min_tokens,
            allowed=f"0 to max_tokens={sampling.max_tokens}",
        )
    if not 0 < sampling.repetition_penalty < float("inf"):
        raise RolloutError(
            "not a penalty", key="repetition_penalty", got=sampling.repetition_penalty, allowed="above 0, finite"
        )
    if sampling.top_k < -1:
        raise RolloutError("not a number of tokens", key="top_k", got=sampling.top_k, allowed="-1 (all), or 1 or more")
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise RolloutError(
                "stop token id outside the vocabulary",
                key="stop_token_ids",
                got=token,
                allowed=f"0 to {vocab_size - 1}",
            )

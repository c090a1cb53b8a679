"""The `hf` sampler: an event loop's view of a runner, with continuous batching and versioned weights.

Consumes: requests from `generate`, weights from `update_weights`. Waits for: nothing; a step runs in the event loop's
thread, and between two steps the loop gets its turn. Unblocked by: the first request. The engine task exists only while
there is work, so a sampler may be used from one event loop after another.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from verl import stacks
from verl.config.rules.sampling import records_experts
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import key_of
from verl.config.schema.rollout import RolloutConfig
from verl.device import give_memory_back, keep_freed_memory, torch_dtype
from verl.errors import ConfigError, RolloutError
from verl.metrics import notice
from verl.models import load_causal_lm
from verl.models.lora import LoraSettings
from verl.models.router_replay import ExpertRecorder
from verl.rollout.adapters import separate_adapter
from verl.rollout.base import (
    Completion,
    Request,
    Sampler,
    check_context,
    check_logprobs_mode,
    check_request,
)
from verl.rollout.hf.adjust import Adjustment
from verl.rollout.hf.attention import PassInterrupted, UnsupportedModelError
from verl.rollout.hf.draw import DrawColumns, draw_tokens, raw_log_probs
from verl.rollout.hf.pool_runner import PoolPolicy, PoolRunner
from verl.rollout.hf.probe import padded_runner, pool_runner
from verl.rollout.hf.quantized import held_bytes
from verl.rollout.hf.rows import UNIFORMS_AT_ONCE, Row
from verl.rollout.hf.runner import ModelRunner, context_length, default_stops, vocab_size
from verl.rollout.hf.scheduler import Admission, Scheduler
from verl.rollout.hf.scoring import TokenScorer
from verl.rollout.hf.seen import Views, check_sight
from verl.rollout.hf.weights import SamplerWeights
from verl.rollout.readiness import Readiness, check_level
from verl.rollout.resume import continued
from verl.rollout.scores import ScoreRequest, Scores
from verl.rollout.uniforms import stream_key, uniforms
from verl.weight_sync import WeightChunk

CALL_TURNS = 2
"""Of the event loop, in which a call that comes from another thread begins."""
RECORD_AFTER = 3
"""Decoding steps over the same rows before they are recorded as a CUDA graph."""


class HFSampler(Sampler):
    """Samples from a Hugging Face causal language model.

    Requests of any length run together: a row that ends leaves its slot to a waiting one, a prompt is computed once for
    all waiting requests that begin with it, and log-probs come from the pass that drew the token.

    Args:
        model: a model folder, or a model. A model that is given is only borrowed: attention implementation and
            training mode are as before after each step, but `update_weights` writes into it.
        dtype: of a model that is loaded here.
        device: of a model that is loaded here; a given one stays where it is.
        max_num_seqs: rows that run at once.
        max_num_batched_tokens: tokens of one step.
        seed: added to every request's own seed.
        max_model_len: longest sequence; None takes the model's.
        full_determinism: bitwise the same result whatever else is in the batch, at some cost in speed.
        stop_token_ids: end every response; None takes the end tokens of the model's generation config.
        share_prompts: compute equal prompts once.
        record: decode over rows that keep their places, on CUDA by recorded graphs; None: on CUDA, unless
            ``enforce_eager``. Takes effect where the sampler owns the model and its family is written out.
        enforce_eager: no CUDA graphs.
        cache_bytes: memory of the KV cache; None: what is needed, on CUDA within a part of the free memory.
        owns_model: only the sampler changes the model's weights, so they may be rearranged; None: if it was loaded
            here.
        adapter: see `SamplerWeights`.
        at_update: what new weights do to running requests.
        logprobs_mode: one of `LOGPROBS_MODES`.
        record_experts: completions say which experts a mixture chose for each token.
        quantization: keep the linear layers of a model that the sampler owns in 8 bits, see `QuantizedLinear`.

    Raises:
        ModelError: the model has no experts to record, or cannot be quantized.

    Example:
        >>> sampler = HFSampler("path/to/model")
        >>> await sampler.generate(Request("a", (5, 6), SamplingParams(max_tokens=4)))
    """

    computes_in_loop: ClassVar[bool] = True
    picture_fields = ("multi_modal_inputs",)

    def __init__(
        self,
        model: str | PreTrainedModel,
        *,
        dtype: str | torch.dtype = torch.float32,
        device: str = "cpu",
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        seed: int = 0,
        max_model_len: int | None = None,
        full_determinism: bool = False,
        stop_token_ids: Sequence[int] | None = None,
        share_prompts: bool = True,
        owns_model: bool | None = None,
        record: bool | None = None,
        enforce_eager: bool = False,
        cache_bytes: int | None = None,
        adapter: LoraSettings | None = None,
        at_update: str = "wait",
        logprobs_mode: str = "processed_logprobs",
        record_experts: bool = False,
        quantization: str | None = None,
    ):
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise RolloutError(
                "every running row takes a token of each step",
                key="max_num_seqs",
                got=max_num_seqs,
                allowed=f"1 to max_num_batched_tokens={max_num_batched_tokens}",
            )
        owned = isinstance(model, str) if owns_model is None else owns_model
        if isinstance(model, str):
            model = cast(PreTrainedModel, load_causal_lm(model, torch_dtype(dtype)).to(device).eval())
        if model.device.type == "cpu":
            keep_freed_memory()
        self.model, self.seed = model, seed
        self.logprobs_mode = check_logprobs_mode(logprobs_mode)
        self.vocab_size = vocab_size(model)
        self.max_model_len = context_length(model, max_model_len)
        self.stop_token_ids = frozenset(default_stops(model) if stop_token_ids is None else stop_token_ids)
        on_cuda = model.device.type == "cuda"
        if record is None:
            record = on_cuda and not enforce_eager and not full_determinism
        policy = PoolPolicy(
            exact=full_determinism,
            pass_tokens=16384 if on_cuda else PoolPolicy.pass_tokens,
            record_after=RECORD_AFTER if record else None,
            cache_bytes=cache_bytes,
        )
        assert owned or quantization is None, "another's weights are not rounded"
        # A runner finds layers that are rounded already. It may move others, and then it is known where new values go.
        rounded = None if quantization is None else SamplerWeights(model, adapter, quantization)
        recorder = ExpertRecorder(model) if record_experts else None
        self._runner: ModelRunner = _make_runner(model, self.max_model_len, policy, owned)
        self._runner.recorder = recorder
        self._interrupt = _PassInterrupt()
        self._runner.is_interrupted = self._interrupt.is_due
        self._weights = rounded or _make_weights(model, adapter, self._runner, owned)
        self._scheduler = Scheduler(
            max_num_seqs,
            max_num_batched_tokens,
            can_chunk=self._runner.can_chunk,
            keeps_prompts=self._runner.keeps_prompts,
            share=share_prompts,
            reserve=self._runner.reserve,
        )
        self._scorer = TokenScorer(model, self.vocab_size, self.max_model_len, max_num_batched_tokens)
        self._views = None if self._runner.features is None else Views(self._runner.features.family)
        self._state, self._adjust = Readiness(), Adjustment()
        self._task: asyncio.Task[None] | None = None
        self.at_update = at_update
        self._is_held = self._interrupts = False
        self._drawn_at_update = 0
        self._in_flight: dict[str, Row] = {}
        self._columns: tuple[list[Row], DrawColumns] | None = None
        features = self._runner.features
        self._never = None if features is None else features.never_drawn
        self._counts = {"steps": 0, "requests": 0, "response_tokens": 0, "weight_updates": 0}

    @classmethod
    def from_config(cls, rollout: RolloutConfig, model: HFModelConfig, device: str = "cpu") -> HFSampler:
        """From the sections ``actor_rollout_ref.rollout`` and ``actor_rollout_ref.model``.

        ``rollout.dtype=auto`` is bfloat16 on an accelerator and float32 on CPU.

        Raises:
            ConfigError: several devices for one model.
        """
        if rollout.tensor_model_parallel_size > 1:
            raise ConfigError(
                "the hf engine holds the whole model in one process",
                key=key_of(rollout, "tensor_model_parallel_size"),
                got=rollout.tensor_model_parallel_size,
                allowed=[1],
                fix=f"Leave it out, or set {key_of(rollout, 'name')} to vllm or sglang, which share a model out.",
            )
        auto = "float32" if device == "cpu" else "bfloat16"
        loaded = load_causal_lm(
            str(model.path),
            torch_dtype(auto if rollout.dtype == "auto" else rollout.dtype),
            model.override_config,
            model.trust_remote_code,
            external_lib=model.external_lib,
            hf_config_path=model.hf_config_path,
        )
        causal_lm = cast(PreTrainedModel, loaded.to(device).eval())
        return cls.configured(rollout, causal_lm, owns_model=True, adapter=separate_adapter(rollout, model))

    @classmethod
    def configured(cls, rollout: RolloutConfig, model: PreTrainedModel, **options: Any) -> HFSampler:
        """Over a model that is there, from the section ``rollout``."""
        sampler = cls(
            model,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=rollout.max_model_len,
            full_determinism=rollout.full_determinism,
            share_prompts=rollout.enable_prefix_caching,
            enforce_eager=rollout.enforce_eager,
            at_update=rollout.requests_at_update,
            logprobs_mode=rollout.logprobs_mode,
            record_experts=records_experts(rollout),
            quantization=rollout.quantization,
            **options,
        )
        check_context(rollout, sampler.max_model_len)
        return sampler

    @classmethod
    def why_adapter_is_merged(cls, rollout: RolloutConfig) -> str:
        return "weights are rounded with the adapter in them" if rollout.quantization is not None else ""

    @property
    def version(self) -> int:
        return self._state.version

    async def generate(self, request: Request) -> Completion:
        self._state.check()
        if request.sees:
            check_sight(request, self.model, self._views)
        check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        self._check_room(request)
        loop = asyncio.get_running_loop()
        self._leave_dead_loop(loop)
        if request.id in self._in_flight:
            raise RolloutError("a request with this id is in flight", key="id", got=request.id)
        row = self._enter(request, loop.create_future())
        self._ensure_running()
        try:
            assert row.future is not None
            return await row.future
        finally:
            self._withdraw(self._in_flight.pop(request.id, row))

    async def score(self, request: ScoreRequest) -> Scores:
        self._state.check()
        self._weights.restore_merged()
        return await self._scorer.score(request)

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        async with _Hold(self, interrupts=self.at_update != "wait"):
            self._weights.restore()
            with self._state.updating(version):
                self._scheduler.forget_prompts()
                self._weights.receive(chunks, version)
                self._runner.refresh()
            self._counts["weight_updates"] += 1
            self._drawn_at_update = self._counts["response_tokens"]

    @property
    def shares_base(self) -> bool:  # type: ignore[override]
        return self._weights.shares_base

    def interrupt_pass(self) -> None:
        self._interrupt.is_requested = True

    async def drawn(self, known: Mapping[str, int]) -> dict[str, Completion]:
        if self._runner.recorder is not None:
            return {}  # the experts of a prefix would be missing
        rows = [(self._in_flight[name], count) for name, count in known.items() if name in self._in_flight]
        return {
            row.request.id: row.since(count, self._state.version)
            for row, count in rows
            if row.state != "ended" and row.began <= count < row.length
        }

    async def abort(self, request_ids: Iterable[str] | None = None) -> int:
        aborted = set(self._in_flight if request_ids is None else request_ids)
        rows = [row for name, row in self._in_flight.items() if name in aborted and row.state != "ended"]
        for row in rows:
            self._withdraw(row)
            row.finish("abort", self._state.version)
        return len(rows)

    async def sleep(self, level: int = 1) -> None:
        check_level(level)
        async with _Hold(self):
            self._runner.clear()
            self._adjust = Adjustment()
            self._scheduler.forget_prompts()
            self._state.enter_sleep(level)
            self._runner.release()
            if level == 2:
                self._weights.release()
            give_memory_back(self.model.device.type)

    async def wake(self) -> None:
        if self._state.is_asleep:  # what a trainer in this process has freed does not fit the cache's buffers
            give_memory_back(self.model.device.type)
        self._weights.restore()
        self._state.is_asleep = False

    def stats(self) -> dict[str, float]:
        """Counters.

        ``forward_tokens`` is what went through the model: each distinct prompt once (``prefill_tokens``), and every
        response token but the last of each response, which needs no successor (``decode_tokens``).
        ``prompt_hits`` counts requests whose prompt was computed for another one, ``images_encoded`` images and videos
        that went through the tower. ``weight_bytes`` is the memory of the weights and of their copies.
        """
        runner = self._runner
        return {
            **self._counts,
            "prefill_tokens": runner.prefill_tokens,
            "decode_tokens": runner.decode_tokens,
            "forward_tokens": runner.prefill_tokens + runner.decode_tokens,
            "prompt_hits": self._scheduler.prompt_hits,
            "images_encoded": 0 if runner.features is None else runner.features.num_encoded,
            "cache_bytes": runner.num_cache_bytes,
            "weight_bytes_received": self._weights.num_bytes,
            "weight_bytes": runner.num_copied_bytes + (0 if self._weights.is_shared else held_bytes(self.model)),
        }

    def _check_room(self, request: Request) -> None:
        most = len(request.token_ids) + request.sampling.max_tokens
        if most > self._runner.capacity:
            raise RolloutError(
                f"the sampler's whole cache is smaller than request {request.id!r} may become",
                key="max_tokens",
                got=most,
                allowed=f"at most {self._runner.capacity} tokens",
            )

    def _enter(self, request: Request, future: asyncio.Future[Completion] | None) -> Row:
        """Queue a request."""
        row = self._in_flight[request.id] = self._row(request, future)
        self._scheduler.add(row)
        return row

    def _row(self, request: Request, future: asyncio.Future[Completion] | None) -> Row:
        sampling = request.sampling
        stops = frozenset() if sampling.ignore_eos else self.stop_token_ids.union(sampling.stop_token_ids)
        key = np.array(
            stream_key(self.seed + sampling.seed, request.uid or request.id, request.sample_index), dtype=np.uint64
        )
        view = None if self._views is None else self._views.of(request)
        prompt = self._scheduler.prompt_for((*request.token_ids, *request.generated_prefix), view)
        return Row(request, prompt, stops, key, future)

    def _ensure_running(self) -> None:
        if (self._task is None or self._task.done()) and not self._is_held:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _leave_dead_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Requests of a loop that was closed under them can never be answered."""
        if self._task is not None and not self._task.done() and self._task.get_loop() is not loop:
            if self._task.get_loop().is_running():
                raise RolloutError("the sampler is in use by another event loop")
            self._task, self._is_held, self._interrupts = None, False, False
            self._runner.clear()
            self._scheduler.drop_all()
            self._in_flight.clear()

    def _withdraw(self, row: Row) -> None:
        """Take a row out, whatever it is doing."""
        was = row.state
        if was in ("waiting", "admitted"):
            self._scheduler.leave(row)
        if was in ("admitted", "running"):
            row.state = "ended"
            self._runner.remove([row])

    async def _run(self) -> None:
        """Step until no row is left; while an update waits, finish or interrupt running rows and admit none."""
        while True:
            # One turn of the loop first, so that concurrent requests join the same batch.
            await asyncio.sleep(0)
            for _ in range(CALL_TURNS if self._interrupt.is_requested else 0):
                self._interrupt.is_requested = False
                await asyncio.sleep(0)
            owes = self._interrupts and self._owes_progress()
            if self._interrupts and not owes:
                self._stop_rows()
            if not self._runner.rows and ((self._is_held and not owes) or self._scheduler.is_empty):
                return
            try:
                self._step()
            except Exception as error:  # the boundary between a step and its requests: each caller gets the real error
                self._give_up(error)

    def _owes_progress(self) -> bool:
        """Whether an update would take computed prompts for nothing, or the second in a row find no new token.

        Every running row has a token since it was admitted.
        """
        return self._scheduler.is_computing or not (self._has_drawn() or self._scheduler.is_empty)

    def _has_drawn(self) -> bool:
        """Whether a token was drawn with the weights in use."""
        return self._counts["response_tokens"] > self._drawn_at_update

    def _stop_rows(self) -> None:
        """Stop the running rows: they queue again, before all others, or return to the caller with their prefix."""
        version, again, rows = self._state.version, [], list(self._runner.rows)
        self._runner.remove(rows)
        for row in rows:
            row.state = "ended"
            if self.at_update == "abort":
                row.finish("abort", version, is_interrupted=True)
                continue
            done = row.attempt("abort", version)
            rest = self._row(continued(row.request, done), row.future)
            rest.earlier = (*row.earlier, done)
            again.append(rest)
            self._in_flight[row.request.id] = rest
        self._scheduler.put_back(again)

    def _give_up(self, error: Exception) -> None:
        """A step failed: end its rows and drop their state."""
        self._runner.clear()
        self._fail([row for row in self._in_flight.values() if row.state in ("running", "admitted")], error)
        self._scheduler.forget_prompts()

    def _fail(self, rows: Sequence[Row], error: Exception) -> None:
        for row in rows:
            self._withdraw(row)
            row.fail(error)

    def _step(self) -> None:
        running = len(self._runner.rows)
        if self._is_held and not self._interrupts:
            admission = Admission()
        else:
            admission = self._scheduler.admit(running, only_begun=self._is_held and self._has_drawn())
        # A pass that the new weights repeat may be cut short; but a request draws a token between two updates at least.
        self._interrupt.is_allowed = self._has_drawn() and not (admission.chunks or admission.joining)
        self._weights.check()
        try:
            logits = self._runner.step(admission.chunks) if running or admission.chunks else torch.empty(0, 0)
        except PassInterrupted:
            return
        rows = list(self._runner.rows)
        complete = [chunk.prompt for chunk in admission.chunks if chunk.completes]
        prompts = [*complete, *admission.joining]
        for prompt, last_logits in zip(complete, logits[len(rows) :]):
            prompt.logits = last_logits
        parts = [logits[: len(rows)], *(p.logits.expand(len(p.rows), -1) for p in prompts if p.logits is not None)]
        admitted = [(prompt, self._scheduler.take(prompt)) for prompt in prompts]
        fresh = [row for _, members in admitted for row in members]
        for row in fresh:
            row.experts = list(row.prompt.experts)
        self._draw([*rows, *fresh], parts)
        ended = [row for row in (*rows, *fresh) if row.is_complete]
        for row in ended:
            self._end(row)
        if ended:
            self._runner.remove(ended)
        starting = [(prompt, [row for row in members if row.state == "running"]) for prompt, members in admitted]
        self._runner.place([(prompt, members) for prompt, members in starting if members])
        for prompt in prompts:
            self._scheduler.release(prompt)
        self._counts["steps"] += 1
        stacks.mark()

    def _draw(self, rows: list[Row], parts: list[torch.Tensor]) -> None:
        """Append one token to each of ``rows``, whose logits are the rows of ``parts``."""
        if not rows:
            return
        with torch.inference_mode():
            filled = [part for part in parts if part.shape[0]]
            logits = filled[0] if len(filled) == 1 else torch.cat(filled)
            if self._columns is None or self._columns[0] != rows:
                columns = DrawColumns.of([row.request.sampling for row in rows], logits.device)
                self._columns = (rows, columns)
            numbers = torch.tensor(self._uniforms(rows), dtype=torch.float64, device=logits.device)
            drawn, of_drawn = draw_tokens(self._adjust(rows, logits), numbers, self._columns[1], self._never)
            self._adjust.drew(drawn)
            if self.logprobs_mode == "raw_logprobs":
                of_drawn = raw_log_probs(logits, drawn)
            tokens, log_probs = drawn.tolist(), of_drawn.tolist()
        if not math.isfinite(sum(log_probs)):
            row = next(row for row, log_prob in zip(rows, log_probs) if not math.isfinite(log_prob))
            raise RolloutError(
                f"the model's logits are not finite (request {row.request.id!r}, position {row.position()})",
                fix="Did the weights become NaN in training?",
            )
        for row, token, log_prob in zip(rows, tokens, log_probs):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
        self._counts["response_tokens"] += len(rows)

    def _uniforms(self, rows: list[Row]) -> list[float]:
        empty = [row for row in rows if not row.uniforms]
        if empty:
            keys = np.stack([row.key for row in empty])
            batch = uniforms(keys, np.array([row.position() for row in empty]), UNIFORMS_AT_ONCE)
            for row, numbers in zip(empty, batch[:, ::-1].tolist()):
                row.uniforms = numbers
        return [row.uniforms.pop() for row in rows]

    def _end(self, row: Row) -> None:
        """Resolve a row that has its last token."""
        row.state = "ended"
        self._counts["requests"] += 1
        row.finish("stop" if row.tokens[-1] in row.stops else "length", self._state.version)


@dataclass
class _PassInterrupt:
    """An update that another thread brings to the event loop, and whether it may interrupt the pass in work."""

    is_requested: bool = False
    is_allowed: bool = False

    def is_due(self) -> bool:
        """Whether the pass stops at its next layer."""
        return self.is_requested and self.is_allowed


class _Hold:
    """Keeps new requests waiting and lets the running ones end, or interrupts them; nothing of the model is in use."""

    def __init__(self, sampler: HFSampler, interrupts: bool = False):
        self._sampler, self._interrupts = sampler, interrupts

    async def __aenter__(self) -> None:
        s = self._sampler
        s._leave_dead_loop(asyncio.get_running_loop())
        if s._is_held:
            raise RolloutError("another update of the weights, or sleep, is under way")
        s._is_held, s._interrupts = True, self._interrupts
        try:
            while s._task is not None and not s._task.done():
                await asyncio.wait([s._task])
        except asyncio.CancelledError:
            self._let_go()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._let_go()

    def _let_go(self) -> None:
        s = self._sampler
        s._is_held = s._interrupts = False
        if s._scheduler.is_empty:
            return
        try:
            s._state.check()
        except RolloutError as error:
            s._fail([row for row in s._in_flight.values() if row.state != "ended"], error)
        else:
            s._ensure_running()


def _make_weights(
    model: PreTrainedModel, adapter: LoraSettings | None, runner: ModelRunner, owned: bool
) -> SamplerWeights:
    """Those that an adapter is merged into are freed while the runner's products have copies of them."""
    in_memory = owned and model.device.type == "cpu"
    weights = SamplerWeights(model, adapter, shares=in_memory and runner.can_share, shares_base=in_memory)
    if isinstance(runner, PoolRunner) and runner.native is not None:
        runner.native.before_copies, runner.native.after_copies = weights.restore_merged, weights.free_merged
    return weights


def _make_runner(model: PreTrainedModel, max_model_len: int, policy: PoolPolicy, owned: bool) -> ModelRunner:
    try:
        return pool_runner(model, max_model_len, policy, owned)
    except UnsupportedModelError as error:
        if policy.exact:
            raise
        notice(
            f"actor_rollout_ref.rollout.name=hf, {type(model).__name__}",
            f"sampled through transformers' own cache, which is slower: {error.message}",
        )
        return padded_runner(model, max_model_len)

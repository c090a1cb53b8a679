"""The `vllm` sampler: one vLLM engine behind the contract of every sampler.

Consumes: requests. Waits for: the engine's thread, one step at a time. Unblocked by: the first request. The task that
steps exists only while there is work, so the sampler may be used from one event loop after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from verl.config.schema.model import HFModelConfig
from verl.config.schema.rollout import RolloutConfig
from verl.errors import RolloutError
from verl.metrics import notice
from verl.models.lora import LoraSettings
from verl.rollout import reload_check
from verl.rollout.adapters import separate_adapter
from verl.rollout.base import Request, check_context
from verl.rollout.gated import GatedSampler, Sampled, among_all
from verl.rollout.lost import EngineLostError
from verl.rollout.model_facts import ModelFacts
from verl.rollout.stream_check import StreamCheck, shapes_on_disk
from verl.rollout.vllm import arguments, versions
from verl.rollout.vllm.engine import VLLMEngine, error_text
from verl.weight_sync import WeightChunk

_R = "actor_rollout_ref.rollout"


@dataclass
class _Running:
    """A request in the engine and what it has so far; one that is leaving does so with its first token."""

    request: Request
    future: asyncio.Future[Sampled]
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    is_leaving: bool = False


class VLLMSampler(GatedSampler):
    """Samples with vLLM in this process.

    The engine's own workers are processes of their own where it shards the model (``tensor_parallel_size``). Before
    the first new weights arrive it is checked that they can (`verl.rollout.reload_check`); a build that cannot be
    updated at run time is refused.

    Args:
        engine_arguments: of vLLM's ``EngineArgs``.
        facts: of the model's folder; None reads them.
        seed: added to every request's own seed.
        stop_token_ids: end every response; None takes the model's.
        adapter: of which nothing but the factors arrives; the engine has the weights of its base.

    Example:
        >>> sampler = VLLMSampler({"model": "path/to/model", "dtype": "float32", "enforce_eager": True})
        >>> await sampler.generate(Request("a", (5, 6), SamplingParams(max_tokens=4)))
    """

    picture_fields = ("multi_modal_inputs",)

    def __init__(
        self,
        engine_arguments: dict[str, Any],
        *,
        facts: ModelFacts | None = None,
        seed: int = 0,
        stop_token_ids: Iterable[int] | None = None,
        ours: Iterable[str] = (),
        adapter: LoraSettings | None = None,
    ):
        versions.check_vllm_version(versions.installed_version())
        model = str(engine_arguments["model"])
        facts = facts or ModelFacts.of(model)
        arguments.check_model(facts, versions.is_on_cpu())
        arguments.check_quantization(engine_arguments, versions.is_on_cpu())
        base = {
            "skip_tokenizer_init": not facts.sees,
            "worker_extension_cls": arguments.PATH,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            **({"mm_device_do_normalize": False} if facts.sees else {}),  # pixels come as the tower takes them
        }
        self.engine = VLLMEngine({**base, **engine_arguments}, [*base, *ours], seed)
        self.takes_images = self.takes_videos = facts.sees
        super().__init__(
            vocab_size=facts.vocab_size,
            max_model_len=min(facts.max_model_len, self.engine.max_model_len),
            seed=seed,
            name="vllm",
        )
        self.stop_token_ids = frozenset(facts.stop_token_ids if stop_token_ids is None else stop_token_ids)
        self._can_verify = engine_arguments.get("load_format", "auto") != "dummy"
        self._is_verified, self._is_tied, self._model = False, facts.is_tied, model
        self.logprobs_mode = str(engine_arguments.get("logprobs_mode") or "processed_logprobs")
        self._adapter = adapter
        self._shapes = None if adapter is not None else shapes_on_disk(model)
        self._new: list[tuple[str, Request, tuple[int, ...]]] = []
        self._dropped: list[str] = []
        self._running: dict[str, _Running] = {}
        self._task: asyncio.Task[None] | None = None
        self._number = 0
        self._counts.update(prompt_tokens=0, cached_tokens=0)

    @classmethod
    def from_config(cls, rollout: RolloutConfig, model: HFModelConfig, device: str = "cpu") -> VLLMSampler:
        """From the sections ``actor_rollout_ref.rollout`` and ``actor_rollout_ref.model``."""
        versions.check_vllm_version(versions.installed_version())
        facts = ModelFacts.of(str(model.path))
        settings = arguments.from_config(rollout, model, device, facts)
        defaults = set(settings) - set(rollout.engine_kwargs.vllm or {})
        sampler = cls(settings, facts=facts, ours=defaults, adapter=separate_adapter(rollout, model))
        sampler.at_update = rollout.requests_at_update
        check_context(rollout, sampler.max_model_len)
        return sampler

    @classmethod
    def why_adapter_is_merged(cls, rollout: RolloutConfig) -> str:
        return "weights are rounded with the adapter in them" if rollout.quantization is not None else ""

    async def _abort(self, request_ids: Collection[str]) -> int:
        count = 0
        for name, running in self._running.items():
            if not running.future.done() and running.request.id in request_ids:
                self._drop(name, running)
                count += 1
        return count

    async def _abort_begun(self, request_ids: Collection[str]) -> None:
        for name, running in self._running.items():
            if not running.future.done() and running.request.id in request_ids:
                running.is_leaving = True
                if running.token_ids:
                    self._drop(name, running)

    def _drop(self, name: str, running: _Running) -> None:
        self._dropped.append(name)
        running.future.set_result(_sampled(running, "abort"))

    def close(self) -> None:
        """Free what the engine holds."""
        self.engine.close()

    async def _sample(self, request: Request) -> Sampled:
        self._check_log_probs(request)
        self._number += 1
        name = f"{request.id}#{self._number}"
        running = _Running(request, asyncio.get_running_loop().create_future())
        self._running[name] = running
        self._new.append((name, request, tuple(self.stop_token_ids.union(request.sampling.stop_token_ids))))
        self._ensure_running()
        try:
            return await running.future
        finally:
            self._running.pop(name, None)
            if running.future.cancelled():
                self._dropped.append(name)

    async def _load(self, chunks: Iterable[WeightChunk], version: int) -> None:
        await self._settle()
        check = StreamCheck(version, self._shapes)
        if self._adapter is None:
            await self._verify()
            self.engine.take_weights(check.watched(chunks))
            self._shapes = check.finished()
            return
        factors = {name: tensor.cpu().clone() for chunk in check.watched(chunks) for name, tensor in chunk.tensors}
        self._shapes = check.finished()  # the first adapter defines the form of the others
        self.engine.take_adapter(factors, self._adapter)

    async def _sleep_engine(self, level: int) -> None:
        await self._settle()
        if self.engine.on_cpu:
            notice(f"{_R}.free_cache_engine", "vLLM on CPU cannot give its memory back, so sleep frees nothing")
        self.engine.sleep(level if self._adapter is None else 1)  # the base does not come again

    async def _wake_engine(self) -> None:
        self.engine.wake()

    def _check_log_probs(self, request: Request) -> None:
        sampling = request.sampling
        same = sampling.is_plain or (sampling.is_greedy and sampling.is_unadjusted)
        if self.logprobs_mode != "raw_logprobs" and not self.engine.reports_processed and not same:
            raise RolloutError(
                "this version of vLLM reports log-probs at temperature 1 only, not those of the distribution it draws "
                "from",
                key=f"{_R}.temperature",
                got=sampling.temperature,
                fix="Set temperature=1, top_p=1, top_k=-1 and no repetition penalty or shortest response, set "
                f"{_R}.logprobs_mode=raw_logprobs to get them knowingly, or update vLLM.",
            )

    async def _verify(self) -> None:
        if self._is_verified or not self._can_verify:
            return
        probe = reload_check.probe_tokens(self.vocab_size, min(16, self.max_model_len - 1))
        before = await self.engine.prompt_log_probs(probe)
        self.engine.reload_last()
        reload_check.check_same(before, await self.engine.prompt_log_probs(probe))
        if self._is_tied and self._shapes is not None:
            self.engine.take_weights([WeightChunk(0, list(reload_check.with_one_embedding(self._model)), True)])
            reload_check.check_uniform(await self.engine.prompt_log_probs(probe), self.vocab_size)
        self._is_verified = True

    def _ensure_running(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _settle(self) -> None:
        """Wait until the engine holds nothing."""
        while self._new or self._dropped or (self._task is not None and not self._task.done()):
            self._ensure_running()
            assert self._task is not None
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self._running or self._new or self._dropped:
            await asyncio.sleep(0)  # concurrent requests join the same step
            new, dropped = self._new, self._dropped
            self._new, self._dropped = [], []
            try:
                step = await self.engine.step(new, dropped)
            except Exception as error:  # boundary: the engine's error reaches all waiting requests
                self._fail_all(error)
                return
            self._counts["steps"] += 1
            for name, refusal in step.refused:
                self._refuse(name, refusal)
            for piece in step.pieces:
                self._add(piece)

    def _add(self, piece: Any) -> None:
        running = self._running.get(piece.request_id)
        if running is None or running.future.done():
            return
        if not running.token_ids:
            self._counts["prompt_tokens"] += len(running.request.token_ids)
            self._counts["cached_tokens"] += piece.num_cached_tokens
        running.token_ids += piece.token_ids
        sampling = running.request.sampling
        temperature = 1.0 if sampling.is_greedy else sampling.temperature
        running.log_probs += [among_all(*one, temperature) for one in zip(piece.log_probs, piece.excluded)]
        if piece.finish_reason is not None:
            running.future.set_result(_sampled(running, piece.finish_reason))
        elif running.is_leaving:
            self._drop(piece.request_id, running)

    def _refuse(self, name: str, error: Exception) -> None:
        running = self._running.get(name)
        if running is not None and not running.future.done():
            refusal = RolloutError(f"vLLM refuses request {running.request.id!r}: {error_text(error)}")
            refusal.__cause__ = error
            running.future.set_exception(refusal)

    def _fail_all(self, error: Exception) -> None:
        self._state.lost = f"vLLM failed: {error_text(error)}"
        for running in self._running.values():
            if not running.future.done():
                failure = EngineLostError(f"vLLM failed while it sampled: {type(error).__name__}: {error_text(error)}")
                failure.__cause__ = error
                running.future.set_exception(failure)


def _sampled(running: _Running, reason: str) -> Sampled:
    return Sampled(tuple(running.token_ids), tuple(running.log_probs), reason)

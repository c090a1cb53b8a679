"""vLLM's engine, stepped in its own thread, so that the event loop stays free while it computes.

Everything that touches the engine runs in that one thread, one thing at a time; only weights are passed from the
caller's thread, while nothing is sampled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as AnswerTimeoutError
from dataclasses import dataclass, field
from typing import Any

import torch

from verl import env, stacks
from verl.errors import RolloutError
from verl.metrics import notice
from verl.models.lora import LoraSettings
from verl.rollout.base import Request
from verl.rollout.gated import NEVER, request_seed
from verl.rollout.vllm import versions, weight_transfer
from verl.rollout.vllm.adapter import as_folder
from verl.rollout.vllm.arguments import check_layout, num_workers, supported_arguments
from verl.rollout.vllm.seen import SeenPrompts
from verl.weight_sync import WeightChunk

RELOAD_SECONDS = 600.0
LEAST_TEMPERATURE = 0.01
"""vLLM raises a lower one to it, and its log-probs with it."""
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
WORKERS_ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""A fork would copy this process's device, its threads' locks and its copies of other processes' pipes."""
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass
class Piece:
    """What one step added to one request.

    Args:
        excluded: at each token the log-probs of those that are never drawn, which vLLM left out of ``log_probs``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    excluded: tuple[tuple[float, ...], ...]
    finish_reason: str | None
    num_cached_tokens: int = 0


@dataclass
class EngineStep:
    """What one step brought."""

    pieces: list[Piece] = field(default_factory=list)
    refused: list[tuple[str, Exception]] = field(default_factory=list)


class VLLMEngine:
    """One engine of vLLM.

    Args:
        arguments: of vLLM's ``EngineArgs``.
        ours: those among them that an older version may lack.
        seed: added to every request's own.
    """

    def __init__(self, arguments: dict[str, Any], ours: Sequence[str] = (), seed: int = 0):
        self.seed = seed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._adapter: Any = None
        self._num_adapters = 0
        self._engine = self._thread.submit(self._start, arguments, ours).result()
        self._seen = SeenPrompts.of(self._engine, self.on_cpu)
        if self._seen is not None and self.reports_processed and not self._reports_tokens:
            why = "this version of vLLM, or its speculative decoding, leaves the share of placeholders"
            notice("actor_rollout_ref.rollout.name", f"{why} of images, which are not drawn, out of log-probs")

    def _start(self, arguments: dict[str, Any], ours: Sequence[str]) -> Any:
        self.num_workers = num_workers(arguments)
        for name, value in (ENVIRONMENT | (WORKERS_ENVIRONMENT if self.num_workers > 1 else {})).items():
            env.set_default(name, value)
        version = versions.installed_version()
        versions.check_vllm_version(version)
        self.on_cpu = versions.is_on_cpu()
        for name, value in CPU_ENVIRONMENT.items() if self.on_cpu else ():
            env.set_default(name, value)
        logging.getLogger("vllm").setLevel(env.get("VLLM_LOGGING_LEVEL") or "ERROR")
        engine_args, engine_class, self._params = versions.vllm_modules()
        check_layout(arguments, self.on_cpu)
        settings = supported_arguments(arguments, engine_args, dict.fromkeys(ours))
        self.reports_processed = settings.get("logprobs_mode") == "processed_logprobs"  # an older version has raw ones
        can_report = versions.supported(self._params.SamplingParams, {"logprob_token_ids": ()})
        # Its rejection sampler reports the drawn token alone.
        is_speculative = bool(settings.get("speculative_config"))
        self._reports_tokens = self.reports_processed and bool(can_report) and not is_speculative
        self._engine_class = engine_class
        threads = torch.get_num_threads()
        try:
            return engine_class.from_engine_args(engine_args(**settings))
        except Exception as error:  # boundary: vLLM reports no more about workers that do not start
            raise RolloutError(f"vLLM {version} did not start: {error_text(error)}", fix="See the cause.") from error
        finally:
            torch.set_num_threads(threads)  # with its own workers vLLM leaves this process one

    @property
    def max_model_len(self) -> int:
        return int(self._engine.model_config.max_model_len)

    async def step(self, new: Sequence[tuple[str, Request, tuple[int, ...]]], dropped: Sequence[str]) -> EngineStep:
        """Add and drop requests, then compute one step.

        Args:
            new: (name, request, stop tokens) of each.
            dropped: names of requests without a waiting caller.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._step, list(new), list(dropped))

    def _step(self, new: list[tuple[str, Request, tuple[int, ...]]], dropped: list[str]) -> EngineStep:
        step = EngineStep()
        for name, request, stops in new:
            try:
                prompt = self._prompt(request)
                params = self.sampling_params(request, stops)
                self._engine.add_request(name, prompt, params, **self._adapted(), **self._priority(request))
            except (ValueError, TypeError, RolloutError) as error:
                step.refused.append((name, error))
        if dropped:
            self._engine.abort_request(dropped)
        if self._engine.has_unfinished_requests():
            step.pieces = [piece_of(output) for output in self._engine.step()]
            if step.pieces:
                stacks.mark()
        return step

    def _prompt(self, request: Request) -> dict[str, Any]:
        if self._seen is not None and request.sees:
            return self._seen.prompt(request)
        if self._seen is not None:
            self._seen.check_text(request)
        return {"prompt_token_ids": [*request.token_ids, *request.generated_prefix]}

    def sampling_params(self, request: Request, stops: tuple[int, ...]) -> Any:
        """vLLM's parameters for what is left of a request's budget."""
        sampling = request.sampling
        if 0 < sampling.temperature < LEAST_TEMPERATURE and not sampling.is_greedy:
            message = "vLLM samples at no temperature between 0 and 0.01, and would raise it"
            raise RolloutError(message, key="temperature", got=sampling.temperature, fix="0 is greedy.")
        excluded = () if self._seen is None else self._seen.family.never_drawn
        # A penalty is applied after the bias and scales it: the share of these tokens cannot be restored then.
        reported = excluded if self._reports_tokens and sampling.repetition_penalty == 1 else ()
        if excluded and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.repetition_penalty != 1):
            why = "with top_p, top_k or a repetition penalty log-probs leave out the share of placeholders of images"
            notice("vLLM on a model that sees", why)
        return self._params.SamplingParams(
            temperature=0.0 if sampling.is_greedy else sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k if sampling.top_k > 0 else -1,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_tokens - len(request.generated_prefix),
            min_tokens=0 if sampling.ignore_eos else max(0, sampling.min_tokens - len(request.generated_prefix)),
            seed=request_seed(request, self.seed),
            stop_token_ids=[] if sampling.ignore_eos else list(stops),
            ignore_eos=True,
            logprobs=None if reported else 0,
            logit_bias=dict.fromkeys(excluded, NEVER) or None,
            **({"logprob_token_ids": list(reported)} if reported else {}),
            detokenize=False,
            output_kind=self._params.RequestOutputKind.DELTA,
        )

    async def prompt_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Of every token after the first, from one pass over the prompt; nothing else may be running."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._prompt_log_probs, list(token_ids))

    def _prompt_log_probs(self, token_ids: list[int]) -> list[float]:
        params = self._params.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        self._engine.add_request("verl-probe", {"prompt_token_ids": token_ids}, params)
        last: Any = None
        while self._engine.has_unfinished_requests():
            last = (self._engine.step() or [last])[-1]
        return [entry[token].logprob for entry, token in zip(last.prompt_logprobs[1:], token_ids[1:])]

    def take_weights(self, chunks: Iterable[WeightChunk]) -> None:
        """Take new weights, in the caller's thread; clears the prefix cache.

        Raises:
            RolloutError: vLLM refuses them.
        """
        try:
            if self.num_workers == 1:
                self._rpc("verl_load", (named for chunk in chunks for named in chunk.tensors))
            else:
                self._take_files(chunks)
        except RolloutError:  # the stream's own, as it is
            raise
        except (ValueError, KeyError, AssertionError, RuntimeError, AnswerTimeoutError) as error:
            raise RolloutError(f"vLLM does not take the weights: {error_text(error)}") from error
        self._forget()

    def take_adapter(self, tensors: Mapping[str, torch.Tensor], settings: LoraSettings) -> None:
        """A LoRA adapter instead of the one before, in the caller's thread; requests that come later use it.

        Args:
            tensors: the factors under their names in peft's files.

        Raises:
            RolloutError: vLLM refuses it.
        """
        before, self._adapter = self._adapter, None
        self._num_adapters += 1  # numbers are not reused: vLLM keeps results under them
        try:
            if before is not None:
                self._engine.remove_lora(before.lora_int_id)
            with as_folder(tensors, settings) as folder:
                request = versions.adapter_request(f"verl-{self._num_adapters}", self._num_adapters, str(folder))
                self._engine.add_lora(request)
        except (ValueError, KeyError, AssertionError, RuntimeError, OSError) as error:
            raise RolloutError(f"vLLM does not take the adapter: {error_text(error)}") from error
        self._adapter = request
        self._forget()

    def reload_last(self) -> None:
        """Reload the weights of the model's folder."""
        self._rpc("verl_reload_last")
        self._forget()

    def _forget(self) -> None:
        """Nothing that other weights computed is used again: neither prefixes nor features of images."""
        self._engine.reset_prefix_cache()
        if self._seen is not None:
            self._engine.reset_encoder_cache()

    def _take_files(self, chunks: Iterable[WeightChunk]) -> None:
        folder = weight_transfer.open_folder()
        reading = self._thread.submit(self._rpc, "verl_load_files", str(folder), RELOAD_SECONDS)
        try:
            weight_transfer.publish(folder, chunks, self.num_workers, RELOAD_SECONDS, reading.done)
            refusals = [text for text in reading.result(RELOAD_SECONDS) if text]
        finally:
            weight_transfer.close_folder(folder)
            wait([reading], RELOAD_SECONDS)  # workers that still wait for a bucket see that the folder is deleted
        if refusals:
            raise RolloutError(f"vLLM does not take the weights: {refusals[0]}")

    def _rpc(self, method: str, *arguments: Any) -> Any:
        return self._engine.collective_rpc(method, args=arguments)

    def sleep(self, level: int) -> None:
        if not self.on_cpu:
            self._thread.submit(self._engine.sleep, level).result()

    def wake(self) -> None:
        if not self.on_cpu:
            self._thread.submit(self._engine.wake_up).result()

    def close(self) -> None:
        """Free what the engine holds."""
        core = getattr(self._engine, "engine_core", None)
        if core is not None:
            core.shutdown()
        self._thread.shutdown(wait=False)

    def _adapted(self) -> dict[str, Any]:
        return {} if self._adapter is None else {"lora_request": self._adapter}

    def _priority(self, request: Request) -> dict[str, Any]:
        return {"priority": request.priority} if request.priority else {}


def piece_of(output: Any) -> Piece:
    """The new tokens in one of vLLM's outputs."""
    (choice,) = output.outputs
    tokens = tuple(int(token) for token in choice.token_ids)
    entries = list(zip(tokens, choice.logprobs or ()))
    logs = tuple(float(entry[token].logprob) for token, entry in entries)
    others = tuple(tuple(float(entry[one].logprob) for one in entry if one != token) for token, entry in entries)
    return Piece(output.request_id, tokens, logs, others, choice.finish_reason, int(output.num_cached_tokens or 0))


def error_text(error: BaseException) -> str:
    """An exception's text on one line, shortened."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 400 else f"{text[:400]} ..."

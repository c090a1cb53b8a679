"""One forward pass over a micro-batch, and what is read from it per response token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from verl import device as devices
from verl.algorithms.kl import Measure, full_kl, full_kl_in_chunks
from verl.algorithms.logprob import (
    candidate_log_probs,
    entropy_from_logits,
    entropy_from_logits_with_chunking,
    logprobs_from_logits,
    sum_pi_squared_from_logits,
    top_k_from_logits,
)
from verl.engines.rows import MicroBatch
from verl.engines.settings import PassSettings
from verl.errors import ConfigError, EngineError
from verl.metrics import notice
from verl.models import attention, lora
from verl.models.fused_head import FusedHead, fusable
from verl.models.head import output_head, select_positions
from verl.models.router_replay import COLUMN, RouterReplay
from verl.models.vision import family_of, placing
from verl.protocol import CANDIDATES

OUTPUTS = {"causal_lm": ("log_probs", "entropy", "sum_pi_squared"), "value": ("values",)}
OF_SEVERAL_TOKENS = ("candidate_log_probs", "top_k_ids", "top_k_log_probs")
"""Outputs (b, T, K) of a language model; see `Engine.infer`."""


class TokenForward:
    """Runs a model on a micro-batch; the head sees only positions that predict a response token.

    Logits become float32 before anything is computed from them. Gradients flow if they are enabled outside.

    Args:
        kind: ``causal_lm`` or ``value``.
        dtype: compute dtype; below float32 the model runs under autocast.
        passes: the settings; the attribute says what this model can do.
    """

    def __init__(self, model: Any, kind: str, device: str, dtype: torch.dtype, passes: PassSettings | None = None):
        self.model, self.kind, self.device, self.dtype = model, kind, device, dtype
        self.head = output_head(model, kind)
        self.family = family_of(getattr(model, "config", None))
        self.passes = self._possible(passes or PassSettings())
        self.fused = self._fused_head(self.passes.fused_head) if kind == "causal_lm" else None
        self.reference: Any = None
        self.measure: Measure = full_kl
        self.routing = RouterReplay(model) if self.passes.router_replay and kind == "causal_lm" else None
        if dtype != torch.float32:
            lora.leave_casts_to_autocast(model)

    @property
    def logits_per_token(self) -> int:
        """Numbers that the head writes per predicted token; with the fused head none that last."""
        return 0 if self.fused is not None or self.kind == "value" else self.model.config.get_text_config().vocab_size

    @property
    def listed_per_token(self) -> int:
        """K of ``top_k_ids`` and ``top_k_log_probs``."""
        return min(self.passes.top_k, self.model.config.get_text_config().vocab_size)

    def _fused_head(self, backend: str | None) -> FusedHead | None:
        if backend is None:
            return None
        fused = FusedHead.of(self.model, backend)
        with devices.autocast(self.device, self.dtype):
            works = fusable(self.model, self.head, fused, self.device)
        if not works:
            raise EngineError(
                f"the fused LM head does not give the log-probs of {type(self.model).__name__}'s own head",
                key="use_fused_kernels",
                fix="Set it to false.",
            )
        return fused

    def _possible(self, passes: PassSettings) -> PassSettings:
        """The settings, without packing where the model's layers would see across the borders of sequences."""
        if not (passes.packed or passes.share_prompts):
            return passes
        with devices.autocast(self.device, self.dtype):
            works = attention.enable(self.model, self.device)
        if not works:
            notice(
                passes.packed_key,
                f"{type(self.model).__name__} cannot be packed (something but attention looks from "
                "token to token, or its attention is its own): rows are padded, and prompts are not shared",
            )
        return replace(passes, packed=works, share_prompts=works and passes.share_prompts)

    def __call__(self, micro: MicroBatch, outputs: Sequence[str], temperature: float = 1.0) -> dict[str, Tensor]:
        """Name -> (b, T) float32, zero where no response token is; ``routed_experts`` (b, l, layers, top_k) int16.

        Raises:
            EngineError: this kind of model has no such output.
            ConfigError: the temperature is not positive.
        """
        self.check(outputs, temperature)
        if self.routing is None or COLUMN not in outputs:
            return self._computed(micro, outputs, temperature)
        with self.routing.recording():
            computed = self._computed(micro, [name for name in outputs if name != COLUMN], temperature)
            return {**computed, COLUMN: micro.experts_by_row(self.routing.take())}

    def _computed(self, micro: MicroBatch, outputs: Sequence[str], temperature: float) -> dict[str, Tensor]:
        """As `__call__`, of what is computed from the last hidden states."""
        if self.fused is not None:
            return self._fused(self.fused, micro, tuple(outputs), temperature)
        if self.kind == "value":
            return {"values": micro.scatter(self._logits(micro).float().squeeze(-1))}
        # The reference first: it may be this very module, and a sharded one runs one pass at a time.
        expected = self._of_reference(micro, temperature) if "full_kl" in outputs else None
        logits = self.logits(micro, temperature)
        statistics = self._statistics(logits, micro, outputs)
        if expected is not None:
            statistics["full_kl"] = full_kl_in_chunks(logits, expected, self.measure)
        return {name: micro.scatter(values) for name, values in statistics.items()}

    def _of_reference(self, micro: MicroBatch, temperature: float) -> Tensor:
        """The reference's logits; it chooses its experts itself."""
        logits: Tensor = self.reference.logits(replace(micro, experts=None), temperature)
        return logits

    def logits(self, micro: MicroBatch, temperature: float) -> Tensor:
        """(N, V) float32, divided by the temperature."""
        logits = self._logits(micro).float()
        return logits if temperature == 1.0 else logits / temperature

    def _statistics(
        self, logits: Tensor, micro: MicroBatch, outputs: Sequence[str], tokens: slice = slice(None)
    ) -> dict[str, Tensor]:
        """(n, V) logits of these tokens -> (n,) each, or (n, K)."""
        statistics = {}
        if "log_probs" in outputs:
            statistics["log_probs"] = logprobs_from_logits(logits, micro.labels[tokens])
        if "entropy" in outputs:
            statistics["entropy"] = self._entropy(logits)
        if "sum_pi_squared" in outputs:
            statistics["sum_pi_squared"] = sum_pi_squared_from_logits(logits)
        if "top_k_ids" in outputs or "top_k_log_probs" in outputs:
            log_probs, ids = top_k_from_logits(logits, self.passes.top_k)
            statistics |= {"top_k_ids": ids.int(), "top_k_log_probs": log_probs}
        if "candidate_log_probs" in outputs:
            listed = None if micro.candidates is None else micro.candidates[tokens]
            statistics["candidate_log_probs"] = self._of_candidates(logits, listed)
        return {name: values for name, values in statistics.items() if name in outputs}

    def _of_candidates(self, logits: Tensor, candidates: Tensor | None) -> Tensor:
        """(N, V) logits -> (N, K) log-probs of the tokens that the batch lists; (0, 1) for a filler without any."""
        if candidates is None and not len(logits):
            return logits[:, :1]
        return candidate_log_probs(logits, needed_candidates(candidates))

    def _entropy(self, logits: Tensor) -> Tensor:
        """(N, V) -> (N,), in pieces or computed again in the backward pass where memory is short."""
        chunk = self.passes.entropy_chunk

        def compute(z: Tensor) -> Tensor:
            return entropy_from_logits(z) if chunk is None else entropy_from_logits_with_chunking(z, chunk)

        return checkpoint(compute, logits, use_reentrant=False) if self.passes.entropy_again else compute(logits)

    def _logits(self, micro: MicroBatch) -> Tensor:
        """(N, V), or (N, 1) of a value model."""
        with devices.autocast(self.device, self.dtype), select_positions(self.head, micro.positions):
            return self._run(micro).logits.squeeze(0)  # an index would cost its gradient a copy

    def _fused(
        self, fused: FusedHead, micro: MicroBatch, outputs: tuple[str, ...], temperature: float
    ) -> dict[str, Tensor]:
        """The outputs without the logits of all tokens; those with a gradient hang on what the model returned, as
        sharded engines need it."""

        def of_logits(logits: Tensor, tokens: slice) -> tuple[Tensor, ...]:
            statistics = self._statistics(logits, micro, outputs, tokens)
            return tuple(statistics[name] for name in outputs)

        several = of_logits if any(name in OF_SEVERAL_TOKENS for name in outputs) else None
        with (
            devices.autocast(self.device, self.dtype),
            fused.instead_of(
                self.head, micro.positions, micro.labels, temperature, outputs, micro.slopes, several
            ) as statistics,
        ):
            returned = self._run(micro).logits.float().sum()
        scattered = {name: micro.scatter(values) for name, values in statistics.items()}
        return {name: x + 0.0 * returned if x.is_floating_point() else x for name, x in scattered.items()}

    def _run(self, micro: MicroBatch) -> Any:
        if self.routing is not None:
            self.routing.replay(micro.recorded_experts())
        plan: dict[str, Any] = {} if micro.attention is None else {"attention_plan": micro.attention}
        if micro.attention is None and micro.vision is not None and self.family is not None and self.family.sees_ahead:
            plan = {"token_type_ids": micro.vision.token_types(micro.input_ids)}
        with placing(self.model, micro.vision) as pictures:
            return self.model(
                input_ids=micro.input_ids,
                attention_mask=None,
                position_ids=micro.position_ids,
                use_cache=False,
                **pictures,
                **plan,
            )

    def check(self, outputs: Sequence[str], temperature: float) -> None:
        """Raise as `__call__` does, without a forward pass."""
        if "full_kl" in outputs and self.kind == "causal_lm":
            self._check_comparison()
            outputs = [name for name in outputs if name != "full_kl"]
        if self.routing is not None:
            outputs = [name for name in outputs if name != COLUMN]
        if self.kind == "causal_lm":
            outputs = [name for name in outputs if name not in OF_SEVERAL_TOKENS]
        check_outputs(self.kind, outputs, temperature)

    def _check_comparison(self) -> None:
        why = None
        if self.reference is None:
            why = "has no reference policy beside it"
        elif self.fused is not None or type(self) is not TokenForward:
            why = "never has the whole vocabulary in one place (a fused head, or ranks that share rows)"
        elif self.passes.packed and not self.reference.packs:
            why = "packs its rows, which its reference cannot"
        if why is not None:
            raise EngineError(f"the exact KL needs the logits of two models, and this one {why}", got="full_kl")


def needed_candidates(candidates: Tensor | None) -> Tensor:
    """The tokens that a batch lists; only a filler, without any position, may have none."""
    if candidates is None:
        raise EngineError("log-probs of listed tokens need the list", got=f"a batch without {CANDIDATES!r}")
    return candidates


def zeros_of(
    output: str, shape: Sequence[int], candidates: Tensor | None, listed_per_token: int, device: str = "cpu"
) -> Tensor:
    """(b, T) of an output, or (b, T, K) of one of several tokens per position.

    Args:
        shape: b and T.
        candidates: (..., K) that the batch lists.
        listed_per_token: K where the model lists its most likely tokens.
    """
    if output == "candidate_log_probs" and candidates is not None:
        shape = (*shape, candidates.shape[-1])
    elif output in OF_SEVERAL_TOKENS:
        shape = (*shape, listed_per_token)
    return torch.zeros(*shape, dtype=torch.int32 if output == "top_k_ids" else torch.float32, device=device)


def check_outputs(kind: str, outputs: Sequence[str], temperature: float) -> None:
    """Raise where a model of this kind has no such output, or a temperature is not positive; see `TokenForward`."""
    unknown = [name for name in outputs if name not in OUTPUTS[kind]]
    if unknown:
        raise EngineError(f"a model of kind {kind!r} has no such output", got=unknown[0], allowed=OUTPUTS[kind])
    if not temperature > 0:
        raise ConfigError(
            "log-probabilities need a positive temperature",
            key="actor_rollout_ref.rollout.temperature",
            got=temperature,
            fix="For greedy sampling set do_sample=False and leave the temperature.",
        )

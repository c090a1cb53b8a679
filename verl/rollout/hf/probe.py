"""Which models the pool can serve: looked up, then tested on a few tokens against the model's own attention.

A family that passes needs no code here. One that does not is served through transformers' cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from verl.errors import RolloutError
from verl.metrics import log, notice
from verl.models.attention import AttentionVariant
from verl.rollout.hf.attention import (
    ATTENTION_NAME,
    PrefillPlan,
    StepPlan,
    UnsupportedModelError,
    attending,
)
from verl.rollout.hf.kv_pool import KVShape
from verl.rollout.hf.native import NativeModel
from verl.rollout.hf.padded_runner import PaddedRunner
from verl.rollout.hf.pool_runner import PoolPolicy, PoolRunner
from verl.rollout.hf.rows import Chunk, Prompt, Row
from verl.rollout.hf.runner import BorrowedModel, ModelRunner, vocab_size

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
PROBE_TOKENS = 12
WINDOW_IN_REACH = 64
"""A sliding window up to this long is crossed by the probe; for a longer one it is checked that the layer names it."""
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 0.1


class RecordingPlan(StepPlan):
    """Notes what each layer stores, besides attending: heads, key and value dimension, variant."""

    seen: dict[int, tuple[int, int, int, AttentionVariant]]

    def __init__(self, prefill: PrefillPlan):
        super().__init__([], prefill)
        self.seen = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionVariant
    ) -> torch.Tensor:
        self.seen[layer] = (key.shape[1], key.shape[2], value.shape[2], how)
        return super().attend(layer, query, key, value, how)


FOREIGN_CODE = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError)
"""What model code that this library did not write raises when it is called in a way it does not know."""


def padded_runner(model: PreTrainedModel, max_model_len: int) -> PaddedRunner:
    """A fallback runner that was tried on ``model``.

    Raises:
        RolloutError: not even transformers' own cache gives the model's own logits.
    """
    try:
        compare_with_model(model, PaddedRunner(model), max_model_len)
    except FOREIGN_CODE as error:
        raise RolloutError(
            f"the hf sampler cannot run {type(model).__name__}: {error}",
            key="actor_rollout_ref.rollout.name",
            fix="Use another engine.",
        ) from error
    return PaddedRunner(model)


def pool_runner(model: PreTrainedModel, max_model_len: int, policy: PoolPolicy, owned: bool = False) -> PoolRunner:
    """A runner that was tried on ``model``.

    Args:
        owned: only the sampler changes the weights and the modules have no hooks: `NativeModel` may replace them.

    Raises:
        UnsupportedModelError: why the pool cannot serve this model.
    """
    if not model._supports_attention_backend:
        raise UnsupportedModelError("its attention does not go through transformers' attention interface")
    config = model.config.get_text_config(decoder=True)
    strange = set(vars(config).get("layer_types") or ()) - KNOWN_LAYER_TYPES
    if strange:
        raise UnsupportedModelError(f"it has layers of type {', '.join(sorted(strange))}")
    try:
        shape, variants = cache_shape(model, max_model_len)
        compare_with_model(model, PoolRunner(model, shape, policy), max_model_len)
    except FOREIGN_CODE as error:
        if isinstance(error, UnsupportedModelError):
            raise
        raise UnsupportedModelError(f"a trial on a few tokens failed ({type(error).__name__}: {error})") from error
    native = _native(model, variants, max_model_len) if owned and not policy.exact else None
    plain = replace(policy, record_after=None)
    if native is not None and not _agrees(model, PoolRunner(model, shape, plain, native), max_model_len):
        native = None
    if policy.record_after is None:
        return PoolRunner(model, shape, plain, native)
    if native is None:
        why = "its family is not written out" if owned else "the sampler does not own its weights"
        notice(f"CUDA graphs, {type(model).__name__}", f"{why}, so it decodes without graphs")
        return PoolRunner(model, shape, plain, None)
    trial = PoolRunner(model, shape, replace(policy, record_after=1), native)
    return PoolRunner(model, shape, policy if _agrees(model, trial, max_model_len) else plain, native)


def _agrees(model: PreTrainedModel, runner: ModelRunner, max_model_len: int) -> bool:
    """Whether a faster way to compute the same does compute the same here; a notice where it does not."""
    try:
        compare_with_model(model, runner, max_model_len)
    except FOREIGN_CODE as error:
        notice(
            f"{type(runner).__name__}, {type(model).__name__}",
            f"samples more slowly than it could, because a trial failed: {type(error).__name__}: {error}",
        )
        return False
    return True


def _native(model: PreTrainedModel, variants: list[AttentionVariant], max_model_len: int) -> NativeModel | None:
    """None for a family that is not written out: its own modules serve it, with the same results."""
    try:
        return NativeModel(model, variants, max_model_len)
    except UnsupportedModelError as error:
        log.info("the hf sampler: %s runs through transformers' modules: %s", type(model).__name__, error.message)
        return None


def cache_shape(model: PreTrainedModel, max_model_len: int) -> tuple[KVShape, list[AttentionVariant]]:
    """What every layer caches per token, and how it attends, from one forward pass."""
    device = model.device
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    prompt = Prompt((0, 0))
    plan = RecordingPlan(PrefillPlan([Chunk(prompt, 0, 2)], None, device))
    with BorrowedModel(model, ATTENTION_NAME).ready(), attending(plan) as cache:
        positions = torch.arange(2, device=device)[None]
        model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    if sorted(plan.seen) != list(range(len(plan.seen))):
        raise UnsupportedModelError("not every layer has a cache of its own")
    kinds = {seen[:3] for seen in plan.seen.values()}
    if len(kinds) != 1:
        raise UnsupportedModelError("its layers cache keys and values of different shapes")
    _check_windows(model, {layer: seen[3].window for layer, seen in plan.seen.items()}, max_model_len)
    heads, key_dim, value_dim = kinds.pop()
    shape = KVShape(len(plan.seen), heads, key_dim, value_dim, model.dtype, device)
    return shape, [plan.seen[layer][3] for layer in range(len(plan.seen))]


def _check_windows(model: PreTrainedModel, windows: dict[int, int | None], max_model_len: int) -> None:
    """A layer with a window that its attention call does not name would silently see too much."""
    config = vars(model.config.get_text_config(decoder=True))
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not isinstance(window, int) or window >= max_model_len or config.get("use_sliding_window") is False:
        return
    kinds = kinds or ["sliding_attention"] * len(windows)
    sliding = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
    if any(windows.get(layer) is None for layer in sliding):
        raise UnsupportedModelError("a layer has a sliding window that its attention call does not name")


def compare_with_model(model: PreTrainedModel, runner: ModelRunner, max_model_len: int) -> None:
    """Two prompts, one of them with two rows, a prefill and two decoding steps against plain forward passes.

    Raises:
        UnsupportedModelError: the logits differ.
    """
    window = vars(model.config.get_text_config(decoder=True)).get("sliding_window")
    length = PROBE_TOKENS
    if isinstance(window, int) and window <= WINDOW_IN_REACH:
        length = window + 3
    length = max(1, min(length, max_model_len - 3))
    vocab = vocab_size(model)
    prompts = [Prompt(tuple((7 * i + 3) % vocab for i in range(length))), Prompt((5 % vocab,))]
    rows = [Row.bare(prompts[0]), Row.bare(prompts[0]), Row.bare(prompts[1])]
    steps = [runner.step([Chunk(p, 0, p.length) for p in prompts])[[0, 0, 1]]]
    for number, row in enumerate(rows):
        row.tokens.append((11 * number + 2) % vocab)
    runner.place([(prompts[0], rows[:2]), (prompts[1], rows[2:])])
    for _ in range(2):
        logits = runner.step([])
        order = [runner.rows.index(row) for row in rows]
        steps.append(logits[order])
        for number, row in enumerate(rows):
            row.tokens.append((13 * number + 1) % vocab)
    reference = _reference(model, rows)
    logits_stack = torch.stack(steps, dim=1).float()
    if not bool(torch.isfinite(reference).all()):
        return  # weights that are not there yet (or broken ones) prove nothing
    difference = float((logits_stack - reference).norm() / reference.norm().clamp(min=1e-30))
    if difference > TOLERANCE.get(model.dtype, LOW_PRECISION_TOLERANCE):
        raise UnsupportedModelError(f"its logits differ from the model's own (relative difference {difference:.1e})")


def _reference(model: PreTrainedModel, rows: Sequence[Row]) -> torch.Tensor:
    """(rows, 3, V) logits where `compare_with_model` looked, by the model's own attention, without a cache."""
    references = []
    with BorrowedModel(model, None).ready():
        for row in rows:
            ids = torch.tensor([[*row.prompt.token_ids, *row.tokens[:2]]], device=model.device)
            references.append(model(input_ids=ids, use_cache=False).logits[0, -3:].float())
    return torch.stack(references)

"""Whether an engine can take new weights: two probes before the first update, for builds that keep them in two forms.

Seen with vLLM 0.32 on CPU: a mixture of experts whose reload shifts log-probs, and a head that is tied to the
embeddings and keeps using a packed copy of the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from verl.errors import RolloutError

TOLERANCE = 1e-3
"""Largest change of a log-prob that is no fault."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
FIX = "Set actor_rollout_ref.rollout.name=hf for this model."


def probe_tokens(vocab_size: int, count: int = 16) -> list[int]:
    """A prompt to measure with."""
    return [(7 * i + 40) % min(vocab_size, 30000) for i in range(count)]


def check_same(before: Sequence[float], after: Sequence[float]) -> None:
    """Loading the current weights again must not change anything.

    Raises:
        RolloutError: it moved the log-probs of a prompt.
    """
    shift = max((abs(a - b) for a, b in zip(before, after)), default=math.nan)
    if not shift <= TOLERANCE:
        raise RolloutError(
            "this engine cannot take new weights for this model: loading the weights that it has already moved "
            f"log-probs by {shift:.1e}",
            allowed=f"at most {TOLERANCE:.0e}",
            fix=FIX,
        )


def check_uniform(log_probs: Sequence[float], vocab_size: int, fix: str = FIX) -> None:
    """With one embedding for all tokens a tied head makes them equally probable, unless it still uses the old ones.

    Raises:
        RolloutError: it is not.
    """
    shift = max((abs(value + math.log(vocab_size)) for value in log_probs), default=math.nan)
    if not shift <= TOLERANCE:
        raise RolloutError(
            "this engine cannot take new weights for this model: its head, which is tied to the embeddings, still "
            f"uses the old ones (log-probs are {shift:.1e} away from what they must be)",
            fix=fix,
        )


def with_one_embedding(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model's folder, all its embeddings replaced by the longest of them."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():
                tensor = opened.get_tensor(name)
                if name.endswith(EMBEDDINGS):
                    longest = tensor[tensor.float().norm(dim=-1).argmax()]
                    tensor = longest.expand_as(tensor).contiguous()
                yield name, tensor

"""Helpers under the path that users' code imports them from."""

from collections.abc import Hashable, Sequence
from typing import Any


def __getattr__(name: str) -> Any:
    """The tokenizer loaders, on first use: importing this package must not load transformers."""
    if name not in ("hf_processor", "hf_tokenizer"):
        raise AttributeError(f"module 'verl.utils' has no attribute {name!r}")
    from verl.compat.paths.utils import tokenizer

    return vars(tokenizer)[name]


def as_torch_index(index: Sequence[Hashable], device: Any = None) -> Any:
    """The number of each row's group, (B,) int64, groups numbered as they come."""
    from verl.compat.forms.core_algos import group_ids

    return group_ids(index, device)


def group_mean_std(scores: Any, gidx: Any, eps: float = 1e-6, device: Any = None) -> tuple[Any, Any, Any]:
    """Of each group, (G,): mean, sample standard deviation, rows; a group of one has mean 0 and deviation 1."""
    from verl.compat.forms.core_algos import group_mean_std as form

    return form(scores, gidx, eps, device)

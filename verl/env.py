"""The only reader of environment variables: what the library takes from the shell is listed and read here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

FORWARDED_PREFIXES = ("NCCL_", "HF_", "WANDB_", "TORCH_", "CUDA_", "HIP_", "ROCR_", "OMP_", "VERL_", "VLLM_", "MLFLOW_")
"""Variables of the shell with these prefixes reach every worker process as they are."""

HARMLESS = frozenset(
    ("HOME", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "PYTHONHASHSEED", "PYTHONHOME",
     "TMPDIR", "TZ", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
)  # fmt: skip
"""All that a process which reads untrusted text gets of the shell's variables."""


def get(name: str, default: str | None = None) -> str | None:
    """The variable's value, or ``default`` where it is unset or empty."""
    return os.environ.get(name) or default


def get_flag(name: str, default: bool = False) -> bool:
    """A yes/no variable: 1, true, yes, on (any case) are yes."""
    value = get(name)
    return default if value is None else value.strip().lower() in ("1", "true", "yes", "on")


def get_int(name: str, default: int) -> int:
    value = get(name)
    return default if value is None else int(value)


def set_default(name: str, value: str) -> None:
    """Set a variable for this process and its children unless the shell already set it."""
    os.environ.setdefault(name, value)


def set_value(name: str, value: str) -> None:
    os.environ[name] = value


@contextmanager
def within(values: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process, and of those that it starts, within the block; afterwards as they were."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def forwarded(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The part of the environment that worker processes must see: NCCL_*, HF_*, WANDB_* and the like."""
    source = os.environ if environment is None else environment
    return {k: v for k, v in source.items() if k.startswith(FORWARDED_PREFIXES)}


def expand(path: str) -> str:
    """``~`` and ``$VARIABLES`` in a path, expanded."""
    return os.path.expandvars(os.path.expanduser(path))


def harmless() -> dict[str, str]:
    """What an interpreter needs to start and to compute as ever; no key and no password of the run."""
    return {name: value for name, value in os.environ.items() if name in HARMLESS}


def whole() -> dict[str, str]:
    """The whole environment, for child processes."""
    return dict(os.environ)

"""verl: reinforcement-learning post-training of language models.

    >>> run = verl.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, reward=score)

Importing this package loads neither torch nor ray; what it names is loaded when it is first used.
"""

from importlib import import_module

from verl import env
from verl._version import __version__
from verl.compat import install

install()

EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
"""Modules with commas between them, imported with this package in every process: what they register is known then."""

OF_API = ("Run", "dpo", "evaluate", "generate", "open_run", "resume", "reward_model", "sft", "train")
__all__ = ["DataProto", "__version__", *OF_API]  # noqa: PLE0604 - names


def __getattr__(name: str):
    if name == "DataProto" or name in OF_API:
        return getattr(import_module("verl.api" if name in OF_API else "verl.protocol"), name)
    raise AttributeError(f"module 'verl' has no attribute {name!r}")


if modules := env.get(EXTERNAL):
    for module in modules.split(","):
        import_module(module.strip())

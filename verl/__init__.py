"""verl: reinforcement-learning post-training of language models.

Importing this package loads neither torch nor ray; `DataProto` is loaded when it is first asked for.
"""

from verl import env
from verl._version import __version__
from verl.compat import install

install()

EXTERNAL = "VERL_USE_EXTERNAL_MODULES"
"""Modules with commas between them, imported with this package in every process: what they register is known then."""

__all__ = ["DataProto", "__version__"]


def __getattr__(name: str):
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module 'verl' has no attribute {name!r}")


if modules := env.get(EXTERNAL):
    import importlib

    for module in modules.split(","):
        importlib.import_module(module.strip())

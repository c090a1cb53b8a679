"""verl: reinforcement-learning post-training of language models.

Importing this package loads neither torch nor ray; `DataProto` is loaded when it is first asked for.
"""

from verl._version import __version__
from verl.compat import install

install()

__all__ = ["DataProto", "__version__"]


def __getattr__(name: str):
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module 'verl' has no attribute {name!r}")

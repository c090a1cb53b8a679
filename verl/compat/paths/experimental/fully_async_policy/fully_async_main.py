"""Upstream's program of fully asynchronous training; it says that it is not built."""

import sys
from functools import partial

from verl.trainer.command import not_built

main = partial(
    not_built,
    "verl.experimental.fully_async_policy.fully_async_main",
    "fully asynchronous training",
    "Start verl.trainer.main_ppo.",
)
if __name__ == "__main__":
    sys.exit(main())

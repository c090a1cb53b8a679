"""Upstream's program of fully asynchronous training; it says that it is not built."""

import sys
from functools import partial

from verl.trainer.command import not_built

NAME, FIX = "verl.experimental.fully_async_policy.fully_async_main", "Start verl.trainer.main_ppo: it trains in turn."
main = partial(not_built, NAME, "fully asynchronous training", FIX)
if __name__ == "__main__":
    sys.exit(main())

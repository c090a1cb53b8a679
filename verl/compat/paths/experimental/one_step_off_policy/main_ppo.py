"""Upstream's program of one-step-off training; it says that it is not built."""

import sys
from functools import partial

from verl.trainer.command import not_built

NAME, FIX = "verl.experimental.one_step_off_policy.main_ppo", "Start verl.trainer.main_ppo: it trains in turn."
main = partial(not_built, NAME, "one-step-off training", FIX)
if __name__ == "__main__":
    sys.exit(main())

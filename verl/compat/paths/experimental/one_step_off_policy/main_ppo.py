"""Upstream's program of one-step-off training; it says that it is not built."""

import sys
from functools import partial

from verl.trainer.command import not_built

main = partial(
    not_built, "verl.experimental.one_step_off_policy.main_ppo", "one-step-off training", "Start verl.trainer.main_ppo."
)
if __name__ == "__main__":
    sys.exit(main())

"""Upstream's older name of `verl.trainer.main_ppo`: there is one trainer, and both names start it."""

import sys

from verl.trainer.main_ppo import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())

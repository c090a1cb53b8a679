"""Upstream's program: `verl.trainer.main_ppo` with the schedule fully_async."""

import sys

from verl.compat.forms.programs import fully_async as main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())

"""The program of upstream's older recipe: `verl.trainer.main_ppo` with the schedule one_step_off."""

import sys

from verl.compat.forms.programs import one_step_off as main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())

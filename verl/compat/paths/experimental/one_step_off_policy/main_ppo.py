"""Upstream's program of one-step-off training; it says that it is not built."""

import sys

from verl.trainer.command import not_built


def main(argv: list[str] | None = None) -> int:
    """Exit status 2."""
    fix = "Start verl.trainer.main_ppo, which samples and trains in turn."
    return not_built("verl.experimental.one_step_off_policy.main_ppo", "one-step-off training", fix)


if __name__ == "__main__":
    sys.exit(main())

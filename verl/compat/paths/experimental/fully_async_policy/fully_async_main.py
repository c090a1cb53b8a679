"""Upstream's program of fully asynchronous training; it says that it is not built."""

import sys

from verl.trainer.command import not_built


def main(argv: list[str] | None = None) -> int:
    """Exit status 2."""
    fix = "Start verl.trainer.main_ppo, which samples and trains in turn; the settings below async_training go."
    name = "verl.experimental.fully_async_policy.fully_async_main"
    return not_built(name, "fully asynchronous training", fix)


if __name__ == "__main__":
    sys.exit(main())

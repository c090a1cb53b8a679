"""``python -m verl``: the command ``verl`` where it is not on the path, and under torchrun."""

import sys

from verl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

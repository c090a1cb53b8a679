"""``python scripts/diagnose.py``: what ``verl doctor`` prints."""

import sys

from verl.cli.doctor import main

if __name__ == "__main__":
    sys.exit(main())

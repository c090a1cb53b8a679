"""The command line of the merger."""

import sys

from verl.trainer.export import main

if __name__ == "__main__":
    sys.exit(main())

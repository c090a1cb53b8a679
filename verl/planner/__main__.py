"""``python -m verl.planner``: what a run will need, before it is started."""

import sys

from verl.cli.planning import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

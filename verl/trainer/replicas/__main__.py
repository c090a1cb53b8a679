"""``python -m verl.trainer.replicas RUN_DIR [--count N]``: the replicas of a run under way, and their number."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from verl.errors import VerlError, printable
from verl.trainer.command import report
from verl.trainer.replicas import files


def main(argv: list[str] | None = None) -> int:
    """Command line; a user's error is one message and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m verl.trainer.replicas", description=__doc__)
    parser.add_argument("folder", type=Path, help="trainer.default_local_dir of the run")
    parser.add_argument("--count", type=int, help="replicas that the run is to have from now on")
    words = parser.parse_args(argv)
    try:
        seen = files.read_seen(words.folder)
        if words.count is not None:
            files.want(words.folder, words.count)
    except VerlError as error:
        return report(error)
    for one in seen["replicas"]:
        print(printable(f"{one['name']}  {one['state']}  processes {one['processes']} on {one['node']}"))
    print(printable(f"{seen['replaced']} of {seen['allowed']} replacements used. {seen['said']}".rstrip()))
    if words.count is not None:
        print(f"The run was asked for {words.count} replicas; this command shows when they are there.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

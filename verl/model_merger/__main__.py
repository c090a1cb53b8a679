"""The command line of the merger, with upstream's options."""

from __future__ import annotations

import argparse
import sys

from verl.errors import NotBuiltError, VerlError
from verl.models.merging import compare, merge


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m verl.model_merger", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("merge", "write a Hugging Face folder"), ("test", "merge, then compare with a folder")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--backend", default="fsdp", help="fsdp; what it was is read off the files")
        command.add_argument("--local_dir", required=True, help="role folder of a checkpoint: global_step_N/actor")
        command.add_argument("--target_dir", default="tmp", help="where the Hugging Face folder goes")
        command.add_argument("--trust-remote-code", action="store_true", help="run modelling code of the checkpoint")
        if name == "test":
            command.add_argument("--test_hf_dir", required=True, help="folder to compare with")
        else:
            command.add_argument("--hf_upload_path", help="repository to push the folder to")
    return parser.parse_args()


def main() -> int:
    """Returns the exit status."""
    a = arguments()
    try:
        if a.backend != "fsdp":
            raise NotBuiltError("merging checkpoints of this backend is not built yet", key="--backend", got=a.backend)
        if getattr(a, "hf_upload_path", None):
            raise NotBuiltError("pushing to a hub is not built yet", key="--hf_upload_path", fix="Push the folder.")
        target = merge(a.local_dir, a.target_dir, a.trust_remote_code)
        print(f"wrote {target}")
        differences = compare(target, a.test_hf_dir) if a.command == "test" else []
        print("\n".join(differences) or ("the two hold the same model" if a.command == "test" else ""), end="\n")
        return int(bool(differences))
    except VerlError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

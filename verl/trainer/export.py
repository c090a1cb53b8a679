"""``python -m verl.model_merger``: checkpoints as Hugging Face folders, pushed on request; with upstream's options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from verl.errors import NotBuiltError, VerlError
from verl.metrics import notice
from verl.models.merging import compare_folders, merge
from verl.registry import ENGINES
from verl.storage import check_push, default_hub, push_to_hub

READ_OFF = {
    "tie_word_embedding": "whether they are tied is read off the model's config.json",
    "is_value_model": "the kind of model is read off its config.json",
    "use_cpu_initialization": "everything here is done on the CPU",
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m verl.model_merger", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("merge", "write a Hugging Face folder"), ("test", "merge, then compare with a folder")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--backend", help="training backend; what it was is read off the files")
        command.add_argument(
            "--local_dir", required=True, help="role folder of a checkpoint, global_step_N/actor, or a GGUF file"
        )
        command.add_argument("--target_dir", default="tmp", help="where the Hugging Face folder goes")
        command.add_argument("--trust-remote-code", action="store_true", help="run modelling code of the checkpoint")
        for option in ("--tie-word-embedding", "--is-value-model", "--use_cpu_initialization"):
            command.add_argument(option, action="store_true", help=f"no effect: {READ_OFF[_name(option)]}")
        if name == "test":
            command.add_argument("--test_hf_dir", required=True, help="folder to compare with")
            continue
        command.add_argument(
            "--hf_upload_path", help="repository owner/name to push the folder to; else nothing is sent"
        )
        command.add_argument("--private", action="store_true", help="a repository that is created is private")
        command.add_argument(
            "--hub",
            default=default_hub(),
            help="huggingface or modelscope (the default with VERL_USE_MODELSCOPE set)",
        )
    return parser.parse_args(argv)


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    a = arguments(argv)
    try:
        return _run(a)
    except VerlError as error:
        print(error, file=sys.stderr)
        return 1


def _run(a: argparse.Namespace) -> int:
    if a.backend is not None and a.backend not in ENGINES.names():
        raise NotBuiltError(
            "merging checkpoints of this backend is not built yet",
            key="--backend",
            got=a.backend,
            allowed=ENGINES.names(),
        )
    for name, why in READ_OFF.items():
        if vars(a)[name]:
            notice(f"--{name}", f"has no effect: {why}")
    repository = a.hf_upload_path if a.command == "merge" else None
    if repository:
        check_push(repository, a.hub, "--hf_upload_path")
    elif a.command == "merge" and a.private:
        notice("--private", "has no effect without --hf_upload_path: nothing is sent")
    target = merge(a.local_dir, a.target_dir, a.trust_remote_code)
    print(f"wrote {target}")
    if repository:
        print(f"pushed it to {push_to_hub(target, repository, a.hub, a.private)}")
    if a.command == "merge":
        return 0
    differences = compare_folders(target, a.test_hf_dir)
    print("\n".join(differences) or "the two hold the same model")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())

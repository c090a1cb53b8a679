"""Full HH-RLHF, dialogues with a better and a worse answer (Bai et al. 2022, arXiv:2204.05862), for three purposes.

``--split sft`` writes prompt and response (the better answer), ``rm`` prompt, chosen and rejected, ``rl`` prompts for a
reward model to score.
"""

from __future__ import annotations

from collections.abc import Sequence

from command import Row, parser, run, save_dir, write
from source import (
    Example,
    HubDataset,
    MakeRow,
    add_source,
    prompt_row,
    rows_of,
    source_folder,
    text_of,
)

HUB_NAME = "Dahoas/full-hh-rlhf"
PUBLISHED = HubDataset(
    HUB_NAME,
    ("prompt", "chosen", "rejected"),
    {"train": "train", "test": "test"},
    leaves_out="both answers are the same",
)


def sft_row(example: Example, index: int, split: str, where: str) -> Row:
    """A prompt and the better of its answers."""
    return {"prompt": text_of(example, "prompt", where), "response": text_of(example, "chosen", where)}


def rm_row(example: Example, index: int, split: str, where: str) -> Row | None:
    """A prompt and both answers; none where they are the same, which teaches nothing."""
    chosen, rejected = text_of(example, "chosen", where), text_of(example, "rejected", where)
    if chosen == rejected:
        return None
    return {"prompt": text_of(example, "prompt", where), "chosen": chosen, "rejected": rejected}


def rl_row(example: Example, index: int, split: str, where: str) -> Row:
    """A prompt for a reward model; the better answer stands where a rule would find the truth."""
    prompt, chosen = text_of(example, "prompt", where), text_of(example, "chosen", where)
    return prompt_row(HUB_NAME, prompt, chosen, {"split": split, "index": index}, ability="alignment", style="model")


MAKERS: dict[str, MakeRow] = {"sft": sft_row, "rm": rm_row, "rl": rl_row}


def main(argv: Sequence[str] | None = None) -> None:
    made = parser("Write HH-RLHF below a folder named after its use.")
    made.add_argument("--split", choices=sorted(MAKERS), required=True, help="what the files are for")
    add_source(made, PUBLISHED)
    arguments = made.parse_args(argv)
    folder, source = save_dir(arguments, made) / arguments.split, source_folder(arguments)
    files = {f"{name}.parquet": rows_of(PUBLISHED, source, split, MAKERS[arguments.split])
             for split, name in PUBLISHED.splits.items()}  # fmt: skip
    folder.mkdir(exist_ok=True)
    write(folder, files, f"{arguments.hdfs_dir.rstrip('/')}/{arguments.split}" if arguments.hdfs_dir else None)


if __name__ == "__main__":
    raise SystemExit(run(main))

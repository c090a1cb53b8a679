"""Full HH-RLHF, dialogues with a better and a worse answer (Bai et al. 2022, arXiv:2204.05862), for three purposes.

``--split sft`` writes two rows of prompt and response for each dialogue, with the better answer and with the other one,
``rm`` prompt, chosen and rejected, the last quarter as ``test.parquet``, ``rl`` prompts for a reward model to score.
All of them come from the split that the authors train on.
"""

from __future__ import annotations

from collections.abc import Sequence

from command import Row, parser, run, save_dir, write
from source import (
    Example,
    HubDataset,
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
    {"train": "train"},
    "~/data/full_hh_rlhf",
)


def pair_row(example: Example, index: int, split: str, where: str) -> Row:
    """A prompt and both answers."""
    return {name: text_of(example, name, where) for name in ("prompt", "chosen", "rejected")}


def sft_rows(pairs: Sequence[Row]) -> list[Row]:
    """Each prompt with either answer, the better one first."""
    return [{"prompt": pair["prompt"], "response": pair[which]} for pair in pairs for which in ("chosen", "rejected")]


def rl_row(example: Example, index: int, split: str, where: str) -> Row:
    """A prompt for a reward model; the better answer stands where a rule would find the truth."""
    pair = pair_row(example, index, split, where)
    extra = {"split": split, "index": index}
    return pair | prompt_row(HUB_NAME, pair["prompt"], pair["chosen"], extra, ability="alignment", style="model")


USES = ("sft", "rm", "rl")


def main(argv: Sequence[str] | None = None) -> None:
    made = parser("Write HH-RLHF below a folder named after its use.", PUBLISHED.folder)
    made.add_argument("--split", choices=USES, default="sft", help="what the files are for")
    add_source(made, PUBLISHED)
    arguments = made.parse_args(argv)
    use = arguments.split
    folder, source = save_dir(arguments, made) / use, source_folder(arguments)
    rows = rows_of(PUBLISHED, source, "train", rl_row if use == "rl" else pair_row)
    files = {"train.parquet": sft_rows(rows) if use == "sft" else rows}
    if use == "rm":
        kept = len(rows) - len(rows) // 4
        files = {"train.parquet": rows[:kept], "test.parquet": rows[kept:]}
    folder.mkdir(exist_ok=True)
    write(folder, files, f"{arguments.hdfs_dir.rstrip('/')}/{use}" if arguments.hdfs_dir else None)


if __name__ == "__main__":
    raise SystemExit(run(main))

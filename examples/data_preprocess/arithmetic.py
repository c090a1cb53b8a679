"""Additions with a checkable answer: the small data set of the quickstart.

Every pair of numbers occurs at most once among training and test prompts, and no test pair is among the supervised
conversations; equal arguments write equal rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from command import Row, parser, run, save_dir, write
from verl.errors import DataError
from verl.metrics import notice

DATA_SOURCE = "arithmetic"
Pair = tuple[int, int]


def draw_pairs(train: int, test: int, sft: int, seed: int, digits: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Distinct pairs for training, test and supervised data; test shares none with the others.

    Training and supervised pairs are disjoint as long as there are enough numbers of ``digits`` digits for both; else
    they overlap, and a notice says by how many.

    Raises:
        DataError: more rows than there are pairs.
    """
    low = 0 if digits == 1 else 10 ** (digits - 1)
    span = 10**digits - low
    total = span * span
    others = max(train, sft)
    if test + others > total:
        raise DataError(
            f"there are {total} pairs of {digits}-digit numbers, fewer than {test} test and {others} other rows",
            key="--digits",
            got=digits,
            fix="Ask for fewer rows or more digits.",
        )
    codes = random.Random(seed).sample(range(total), min(total, test + train + sft))
    pairs = [(low + code // span, low + code % span) for code in codes]
    shared = test + train + sft - len(pairs)
    if shared > 0:
        notice("--sft_size", f"{shared} of its pairs are training prompts too: there are only {total} pairs")
    return pairs[test : test + train], pairs[:test], pairs[len(pairs) - sft :]


def prompt_row(pair: Pair, index: int, split: str) -> Row:
    """One prompt, such as ``12+34=``, with the sum as its ground truth."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question(pair)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(sum(pair))},
        "extra_info": {"split": split, "index": index},
    }


def conversation_row(pair: Pair) -> Row:
    """One supervised conversation: the same question with the bare sum as its answer."""
    asked, said = question(pair), str(sum(pair))
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def question(pair: Pair) -> str:
    return f"{pair[0]}+{pair[1]}="


def main(argv: Sequence[str] | None = None) -> None:
    made = parser("Write additions as train.parquet, test.parquet and sft.parquet.")
    made.add_argument("--train_size", type=int, default=4096, help="training prompts")
    made.add_argument("--val_size", type=int, default=512, help="test prompts, none of them among the others")
    made.add_argument("--sft_size", type=int, default=2048, help="supervised conversations")
    made.add_argument("--digits", type=int, default=2, help="digits of both numbers")
    made.add_argument("--seed", type=int, default=0)
    arguments = made.parse_args(argv)
    for name in ("train_size", "val_size", "sft_size", "digits"):
        if vars(arguments)[name] < 1:
            made.error(f"--{name} must be at least 1")
    train, test, sft = draw_pairs(
        arguments.train_size, arguments.val_size, arguments.sft_size, arguments.seed, arguments.digits
    )
    files = {
        "train.parquet": [prompt_row(pair, i, "train") for i, pair in enumerate(train)],
        "test.parquet": [prompt_row(pair, i, "test") for i, pair in enumerate(test)],
        "sft.parquet": [conversation_row(pair) for pair in sft],
    }
    write(save_dir(arguments, made), files, arguments.hdfs_dir)


if __name__ == "__main__":
    raise SystemExit(run(main))

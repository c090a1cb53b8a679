"""Three conversations of several turns, hand-written: to see what the loss of supervised fine-tuning falls on."""

from __future__ import annotations

from collections.abc import Sequence

from command import Row, parser, run, save_dir, write

CONVERSATIONS = (
    ("user: What is 7 times 8?", "assistant: 56.", "user: And half of it?", "assistant: 28."),
    ("system: You answer in one word.", "user: Which planet is red?", "assistant: Mars.", "user: And the largest?",
     "assistant: Jupiter."),
    ("user: Count to three.", "assistant: 1, 2, 3.", "user: Backwards, please.", "assistant: 3, 2, 1."),
)  # fmt: skip


def row(turns: Sequence[str]) -> Row:
    """A conversation in the column ``messages``."""
    parts = (turn.partition(": ") for turn in turns)
    return {"messages": [{"role": role, "content": content} for role, _, content in parts]}


def main(argv: Sequence[str] | None = None) -> None:
    made = parser("Write three conversations of several turns.", "~/data/multiturn")
    arguments = made.parse_args(argv)
    rows = [row(turns) for turns in CONVERSATIONS]
    write(save_dir(arguments, made), {"train.parquet": rows, "test.parquet": rows[:1]}, arguments.hdfs_dir)


if __name__ == "__main__":
    raise SystemExit(run(main))

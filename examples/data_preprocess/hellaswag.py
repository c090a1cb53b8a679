"""HellaSwag, which of four endings follows (Zellers et al. 2019, arXiv:1905.07830): the answer is a number.

No built-in scorer: the ground truth is the number of the ending, 0 to 3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from command import Row, run
from source import Example, HubDataset, convert, list_of, prompt_row, text_of
from verl.errors import DataError

HUB_NAME = "Rowan/hellaswag"
MARKUP = re.compile(r"\[[^\]]*\]")
QUESTION = "{context}\n\nHow does it go on?\n{endings}\nAnswer with the number of the ending."
PUBLISHED = HubDataset(
    HUB_NAME,
    ("activity_label", "ctx", "endings", "label"),
    {"train": "train", "validation": "validation", "test": "test"},
    "~/data/hellaswag",
    leaves_out="they have no answer",
)


def clean(text: str) -> str:
    """A text without the markup that its source left in it, such as ``[header]``.

    Example:
        >>> clean("[title] Peel  the apple.")
        'Peel the apple.'
    """
    return " ".join(MARKUP.sub(" ", text).split())


def to_row(example: Example, index: int, split: str, where: str) -> Row | None:
    """The example's own columns and those of the RL dataset; none for one to train on that has no answer.

    The test split is published without answers; its rows have an empty one.
    """
    label, endings = str(example["label"]).strip(), list_of(example, "endings", where)
    if not label and split != "test":
        return None
    known = ("0", "1", "2", "3", *([""] if split == "test" else []))
    if len(endings) != 4 or not all(isinstance(ending, str) for ending in endings) or label not in known:
        raise DataError("not four endings and one of 0, 1, 2, 3", key=where, got=(len(endings), label))
    context = clean(f"{text_of(example, 'activity_label', where)}: {text_of(example, 'ctx', where)}")
    listed = "\n".join(f"{number}: {clean(ending)}" for number, ending in enumerate(endings))
    question = QUESTION.format(context=context, endings=listed)
    extra = {"split": split, "index": index}
    return {**example, **prompt_row(HUB_NAME, question, label, extra, ability="commonsense", style="rule")}


def main(argv: Sequence[str] | None = None) -> None:
    says = "Write HellaSwag as train, validation and test.parquet (the test split has no answers)."
    convert(PUBLISHED, to_row, argv, says)


if __name__ == "__main__":
    raise SystemExit(run(main))

"""GSM8K, grade-school word problems, as prompts with a checkable answer (Cobbe et al. 2021, arXiv:2110.14168).

Reads the jsonl files its authors published, or the hub's data set, and writes ``train.parquet`` and ``test.parquet``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.data.files import SUFFIXES, read_files, require_column
from verl.data.prepare.command import Row, parser, run, save_dir, write
from verl.errors import DataError, MissingDependencyError
from verl.storage import resolve

HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Think step by step and write the final answer as a number after "####".'
FINAL_ANSWER = re.compile(r"####\s*(-?[\d.,]+)\s*$")
SPLITS = ("train", "test")


def final_answer(solution: str) -> str | None:
    """The number behind ``####`` at the end of a solution, without thousands separators; None if there is none.

    Example:
        >>> final_answer("2 * 540 = 1080\\n#### 1,080")
        '1080'
    """
    found = FINAL_ANSWER.search(solution)
    return found.group(1).replace(",", "") if found else None


def to_row(example: Mapping[str, Any], index: int, split: str, where: str) -> Row:
    """One row in the schema of the RL dataset; ``where`` names the example for a message."""
    question, solution = example["question"], example["answer"]
    answer = final_answer(solution or "")
    if not question or answer is None:
        fault = "the question is empty" if not question else "no number after '####' at the end of the answer"
        raise DataError(fault, key=where, got=solution if question else question)
    return {
        "data_source": HUB_NAME,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "question": question, "answer": solution},
    }


def read_split(source: Path | None, split: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The examples of a split, each with a name for messages: from a folder, or from the hub where there is none."""
    if source is None:
        rows = _from_hub(split)
        return ((f"{HUB_NAME}, {split}, row {i}", row) for i, row in enumerate(rows))
    table, origin = read_files(_split_file(source, split), key="--local_dataset_path")
    for column in ("question", "answer"):
        require_column(column, table.column_names, file=origin.files[0], key=None)
    return ((origin.describe(i), row) for i, row in enumerate(table.to_pylist()))


def _split_file(folder: Path, split: str) -> Path:
    if not folder.is_dir():
        raise DataError(
            f"not a folder with {', '.join(s + '.jsonl' for s in SPLITS)}", key="--local_dataset_path", got=str(folder)
        )
    # The authors' names first; a clone of the hub's data set has main/train-00000-of-00001.parquet.
    patterns = [f"{split}{suffix}" for suffix in SUFFIXES] + [f"main/{split}-*.parquet", f"{split}-*.parquet"]
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    return found[0] if found else resolve(folder / f"{split}.jsonl", key="--local_dataset_path")


def _from_hub(split: str) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(HUB_NAME, "main", split=split)
    except ImportError as failure:
        raise MissingDependencyError(f"the hub's data set needs more packages: {failure}") from failure
    except (OSError, ValueError) as failure:
        raise DataError(
            f"the hub did not give the data set: {failure}",
            got=HUB_NAME,
            fix="Check the network, or give --local_dataset_path, a folder with train.jsonl and test.jsonl.",
        ) from failure


def main(argv: Sequence[str] | None = None) -> None:
    made = parser("verl.data.prepare.gsm8k", "Write GSM8K as train.parquet and test.parquet.")
    made.add_argument("--local_dataset_path", help="folder with train.jsonl and test.jsonl; without it, the hub's")
    arguments = made.parse_args(argv)
    folder = save_dir(arguments, made)
    source = resolve(arguments.local_dataset_path, key="--local_dataset_path") if arguments.local_dataset_path else None
    files = {}
    for split in SPLITS:
        examples = enumerate(read_split(source, split))
        files[f"{split}.parquet"] = [to_row(example, index, split, where) for index, (where, example) in examples]
    write(folder, files, arguments.hdfs_dir)


if __name__ == "__main__":
    raise SystemExit(run(main))

"""Pairs of answers for the tiny runs: the right sum is chosen, a sum that is one too large rejected.

python examples/tiny/pairs.py pairs.parquet
"""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 32


def main(path: str) -> None:
    rows = []
    for i in range(ROWS):
        a, b = 10 + i, 90 - i
        prompt = [{"role": "user", "content": f"{a}+{b}="}]
        rows.append({"prompt": prompt, "chosen": str(a + b), "rejected": str(a + b + 1)})
    pq.write_table(pa.Table.from_pylist(rows), path)


if __name__ == "__main__":
    main(sys.argv[1])

"""Conversations of several turns as parquet: the same program as ``python -m verl.data.prepare.multiturn``.

python examples/data_preprocess/multiturn.py --local_save_dir ~/data/multiturn
"""

from verl.data.prepare.command import run
from verl.data.prepare.multiturn import main

if __name__ == "__main__":
    raise SystemExit(run(main))

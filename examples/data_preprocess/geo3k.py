"""Geometry3K as parquet: the same program as ``python -m verl.data.prepare.geo3k``.

python examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
"""

from verl.data.prepare.command import run
from verl.data.prepare.geo3k import main

if __name__ == "__main__":
    raise SystemExit(run(main))

"""MATH as parquet: the same program as ``python -m verl.data.prepare.math``.

python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math_dataset
"""

from verl.data.prepare.command import run
from verl.data.prepare.math import main

if __name__ == "__main__":
    raise SystemExit(run(main))

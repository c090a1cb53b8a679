"""Questions of Search-R1 as parquet: the same program as ``python -m verl.data.prepare.search_r1``.

python examples/data_preprocess/preprocess_search_r1_dataset.py --local_save_dir ~/data/searchR1
"""

from verl.data.prepare.command import run
from verl.data.prepare.search_r1 import main

if __name__ == "__main__":
    raise SystemExit(run(main))

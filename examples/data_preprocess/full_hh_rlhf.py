"""Full HH-RLHF as parquet: the same program as ``python -m verl.data.prepare.full_hh_rlhf``.

python examples/data_preprocess/full_hh_rlhf.py --local_save_dir ~/data/full_hh_rlhf
"""

from verl.data.prepare.command import run
from verl.data.prepare.full_hh_rlhf import main

if __name__ == "__main__":
    raise SystemExit(run(main))

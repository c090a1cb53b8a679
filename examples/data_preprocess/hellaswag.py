"""HellaSwag as parquet: the same program as ``python -m verl.data.prepare.hellaswag``.

python examples/data_preprocess/hellaswag.py --local_save_dir ~/data/hellaswag
"""

from verl.data.prepare.command import run
from verl.data.prepare.hellaswag import main

if __name__ == "__main__":
    raise SystemExit(run(main))

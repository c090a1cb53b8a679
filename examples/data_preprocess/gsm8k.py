"""GSM8K as parquet: the same program as ``python -m verl.data.prepare.gsm8k``, at the path that scripts know.

python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
"""

from verl.data.prepare.command import run
from verl.data.prepare.gsm8k import main

if __name__ == "__main__":
    raise SystemExit(run(main))

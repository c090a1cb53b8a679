"""GSM8K as conversations as parquet: the same program as ``python -m verl.data.prepare.gsm8k_multiturn_sft``.

python examples/data_preprocess/gsm8k_multiturn_sft.py --local_save_dir ~/data/gsm8k_multiturn_sft
"""

from verl.data.prepare.command import run
from verl.data.prepare.gsm8k_multiturn_sft import main

if __name__ == "__main__":
    raise SystemExit(run(main))

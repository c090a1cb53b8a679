"""GSM8K with a tool as parquet: the same program as ``python -m verl.data.prepare.gsm8k_multiturn_w_tool``.

python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_multiturn_w_tool
"""

from verl.data.prepare.command import run
from verl.data.prepare.gsm8k_multiturn_w_tool import main

if __name__ == "__main__":
    raise SystemExit(run(main))

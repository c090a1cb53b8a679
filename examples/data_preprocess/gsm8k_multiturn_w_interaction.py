"""GSM8K with an interaction: the same program as ``python -m verl.data.prepare.gsm8k_multiturn_w_interaction``.

python examples/data_preprocess/gsm8k_multiturn_w_interaction.py --local_save_dir ~/data/gsm8k_multiturn_w_interaction
"""

from verl.data.prepare.command import run
from verl.data.prepare.gsm8k_multiturn_w_interaction import main

if __name__ == "__main__":
    raise SystemExit(run(main))

"""GSM8K for the agent loop with tools as parquet.

The same program as ``python -m verl.data.prepare.gsm8k_multiturn_w_tool --agent_name tool_agent``:

python examples/data_preprocess/gsm8k_tool_agent_loop.py --local_save_dir ~/data/gsm8k_tool_agent_loop
"""

import sys

from verl.data.prepare.command import run
from verl.data.prepare.gsm8k_multiturn_w_tool import main

if __name__ == "__main__":
    raise SystemExit(run(main, ["--agent_name", "tool_agent", *sys.argv[1:]]))

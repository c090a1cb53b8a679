"""DAPO's problems for the agent loop with tools as parquet.

The same program as ``python -m verl.data.prepare.dapo_math --agent_name tool_agent``:

python examples/data_preprocess/dapo_multiturn_w_tool.py --local_save_dir ~/data/dapo_multiturn_w_tool
"""

import sys

from verl.data.prepare.command import run
from verl.data.prepare.dapo_math import main

if __name__ == "__main__":
    raise SystemExit(run(main, ["--agent_name", "tool_agent", *sys.argv[1:]]))

"""AIME 2024 for the agent loop with tools as parquet.

The same program as ``python -m verl.data.prepare.aime --agent_name tool_agent``:

python examples/data_preprocess/aime2024_multiturn_w_tool.py --local_save_dir ~/data/aime2024_multiturn_w_tool
"""

import sys

from verl.data.prepare.aime import main
from verl.data.prepare.command import run

if __name__ == "__main__":
    raise SystemExit(run(main, ["--agent_name", "tool_agent", *sys.argv[1:]]))

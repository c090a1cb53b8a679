"""Print the mismatch between sampler and trainer in a run's metrics file, first and last step side by side.

python examples/rollout_importance_sampling/show_mismatch.py outputs/rollout_is/logs/rollout_is/token_truncate.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from verl.observability.plots import read_metrics

HEALTHY = {
    "rollout_is_eff_sample_size": "above 0.8",
    "rollout_is_mean": "near 1",
    "rollout_is_veto_fraction": "below 0.05",
    "rollout_is_catastrophic_token_fraction": "below 0.01",
    "mismatch_kl": "near 0",
    "mismatch_k3_kl": "near 0",
    "mismatch_ppl_ratio": "near 1",
}


def main(path: str) -> int:
    """Returns 1 where the run logged no mismatch."""
    rows = [(step, data) for step, data in read_metrics(Path(path)) if any(k.startswith("mismatch/") for k in data)]
    if not rows:
        print(f"{path}: no step has mismatch/ metrics; is algorithm.rollout_is_threshold set?", file=sys.stderr)
        return 1
    (first, before), (last, after) = rows[0], rows[-1]
    table = Table("metric (mismatch/)", f"step {first}", f"step {last}", "healthy", title=path)
    for key in sorted(k for k in after if k.startswith("mismatch/")):
        name = key.removeprefix("mismatch/")
        table.add_row(name, f"{before[key]:.6g}", f"{after[key]:.6g}", HEALTHY.get(name, ""))
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

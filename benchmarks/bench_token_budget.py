"""How full micro-batches of packed rows are on Megatron-Core's layouts; arithmetic on the plan, no model.

    python benchmarks/bench_token_budget.py [--rows 512] [--budget 16384] [--seeds 10]

Prompts of 128 tokens, responses of log-normal lengths (median 512, at most 4096); one data-parallel rank's rows of a
mini-batch are cut as the engine cuts them (`plan_packed`, the budget of a process times ``context_parallel_size``).

- micro-batches over the bound: of all seeds; the bound is tokens / budget, rounded up;
- share of the token bound: real tokens / computed ones, which also are padding to a multiple of the context- and
  tensor-parallel processes, and the fillers of interleaved stages; as a gain over padded rows its bound is
  padded / real tokens. The lowest of the seeds;
- with Transformer Engine: the same share, where context-parallel processes want each row to be a multiple of
  2 x context x tensor tokens;
- budget filled: computed tokens / (micro-batches x budget), mean and lowest. A last micro-batch that is not full costs
  more of it the fewer there are.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from figures import Figures, add_json

from verl.algorithms.micro_batches import ceildiv, roundup_divisible
from verl.engines.packing import computed_tokens, plan_packed
from verl.engines.rows import AlignedRows
from verl.protocol import DataProto

PROMPT, MEDIAN, LONGEST = 128, 512, 4096


@dataclass(frozen=True)
class MegatronLayout:
    """Sizes that change what is computed; ``interleaved`` stages want a multiple of their number."""

    name: str
    context: int = 1
    tensor: int = 1
    interleaved: int = 1


LAYOUTS = (
    MegatronLayout("one process"),
    MegatronLayout("tensor 8, sequence parallel", tensor=8),
    MegatronLayout("context 4", context=4),
    MegatronLayout("context 2, tensor 4, interleaved 4", 2, 4, 4),
)


def rows_of(count: int, sigma: float, seed: int) -> AlignedRows:
    generator = np.random.default_rng(seed)
    lengths = np.clip(np.exp(generator.normal(np.log(MEDIAN), sigma, count)).astype(int), 1, LONGEST)
    mask = torch.from_numpy(np.arange(LONGEST) < lengths[:, None]).long()
    ids = torch.from_numpy(generator.integers(3, 512, (count, PROMPT + LONGEST)))
    attention = torch.cat([torch.ones(count, PROMPT, dtype=torch.long), mask], 1)
    tensors = {"input_ids": ids * attention, "attention_mask": attention, "responses": ids[:, PROMPT:] * mask}
    return AlignedRows.of(DataProto.from_dict(tensors={**tensors, "response_mask": mask}))


def add_row(
    figures: Figures, layout: MegatronLayout, sigma: float, budget: int, batches: Sequence[AlignedRows]
) -> None:
    """Print and keep the figures of a layout; ``budget`` is that of all processes which share a row."""
    multiple = layout.context * layout.tensor
    counts, over, shares, fast, filled = [], 0, [], [], []
    for rows in batches:
        plan, real = plan_packed(rows, max_tokens=budget), sum(rows.lengths)
        computed = computed_tokens(rows, plan, share=False, multiple=multiple)
        fillers = multiple * (roundup_divisible(len(plan), layout.interleaved) - len(plan))
        by_row = sum(roundup_divisible(length, 2 * multiple) for length in rows.lengths)
        counts.append(len(plan))
        over += len(plan) - ceildiv(real, budget)
        shares.append(real / (computed + fillers))
        fast.append(real / (fillers + (by_row if layout.context > 1 else computed)))
        filled.append(computed / (len(plan) * budget))
    mean, lowest = statistics.mean(filled), min(filled)
    print(
        f"| {layout.name} | {sigma} | {min(counts)} to {max(counts)} | {over} | {min(shares):.2%} | {min(fast):.2%} "
        f"| {mean:.1%} ({lowest:.1%}) |"
    )
    figures.add(
        f"{layout.name}, sigma {sigma}",
        {"over the bound": over, "share of the token bound": min(shares), "with Transformer Engine": min(fast),
         "budget filled": mean},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="of one data-parallel rank in a mini-batch")
    parser.add_argument("--budget", type=int, default=16384, help="ppo_max_token_len_per_gpu")
    parser.add_argument("--sigmas", nargs="+", type=float, default=[0.3, 0.6, 0.9, 1.2])
    parser.add_argument("--seeds", type=int, default=10)
    add_json(parser)
    arguments = parser.parse_args()
    figures = Figures()
    heads = ("over the bound", "share of the token bound", "with Transformer Engine", "budget filled, mean (lowest)")
    print(f"| layout | sigma | micro-batches | {' | '.join(heads)} |\n|" + "---|" * 7)
    for sigma in arguments.sigmas:
        batches = [rows_of(arguments.rows, sigma, seed) for seed in range(arguments.seeds)]
        for layout in LAYOUTS:
            add_row(figures, layout, sigma, arguments.budget * layout.context, batches)
    figures.write(arguments.json)


if __name__ == "__main__":
    main()

"""A GRPO step of a published model of 135 million parameters: where its time goes, next to TRL.

    python examples/smollm2/model.py outputs/smollm2/model
    python benchmarks/bench_real_step.py --model outputs/smollm2/model [--peer-python path/to/venv-with-trl/bin/python]

Additions of two digits ("What is 44 plus 34?"), 16 prompts x 8 samples, float32, one update per batch, AdamW, no
reference, no gradient checkpointing: the steps of `examples/smollm2`, with real answers that end where the model ends
them. ``--length 256`` lets them be long: answers differ in length by an order of magnitude then. TRL takes its step in
passes of 16 rows, which is faster than one pass of all 128, and such a pass took 22 GB; ``--lora`` adds an adapter of
ours. A line comes after each run. The table gives medians over all steps but the first, by the clock, and the peak of
the resident set. The profile is of one step of ours: seconds in operations of each kind, and what is left of the clock;
then its training half beside the machine's products.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from bench_grpo_step import OURS, PROMPTS, run_ours, run_peer
from figures import ROOT, Figures, Run, add_json, linear_seconds

EXAMPLE = ROOT / "examples" / "smollm2"
sys.path.insert(0, str(EXAMPLE))

STEPS, WARMUP, PEER_PASSES = 4, 1, 8
LORA = ["actor_rollout_ref.model.lora_rank=32"]
PROFILE = """
import os
import torch
from torch.profiler import ProfilerActivity, profile

flop = [0]

def counted(module, inputs, output):
    if isinstance(module, torch.nn.Linear) and torch.is_grad_enabled():
        flop[0] += 3 * 2 * inputs[0].numel() * module.out_features  # forwards, and backwards twice

torch.nn.modules.module.register_module_forward_hook(counted)  # a layer's forward pass may be replaced

class Profile(Callback):
    def on_step_end(self, trainer, batch):
        counts.append(flop[0])
        if trainer.ctx.step == 1:
            self.profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.profile.start()
            self.began = time.perf_counter()
        elif trainer.ctx.step == 2:
            seconds = time.perf_counter() - self.began
            self.profile.stop()
            averages = self.profile.key_averages(group_by_input_shape=True)
            rows = [(row.key, str(row.input_shapes), row.self_cpu_time_total / 1e6) for row in averages]
            self.rows = [seconds, rows]
        if trainer.ctx.step == STEPS:
            json.dump([*self.rows, counts[-1] - counts[-2]], open(os.environ["PROFILE"], "w"))

counts = []

class Runner"""
PROFILED = OURS.replace("class Runner", PROFILE.replace("STEPS", str(STEPS)))
PROFILED = PROFILED.replace("append(Clock())", "extend([Clock(), Profile()])")
KINDS = {
    "LM head and loss": ("{vocab}",),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn", "onednn"),
    "attention": ("attention", "flash", "sdpa"),
    "optimizer": ("adam", "_foreach"),
}
"""Where the time of an operation counts: the first kind of which a part of its name, or of its shapes, is one."""


def make_inputs(folder: Path) -> tuple[Path, Path]:
    """Our prompts and the peer's: the same rows."""
    import pandas as pd
    from data import rows  # type: ignore[import-not-found]

    shutil.copy(EXAMPLE / "reward.py", folder)
    drawn = rows("addition", PROMPTS * (STEPS + 2), seed=1)
    pd.DataFrame(drawn).to_parquet(folder / "prompts.parquet")
    (folder / "prompts.json").write_text(json.dumps([{"prompt": row["prompt"]} for row in drawn]))
    return folder / "prompts.parquet", folder / "prompts.json"


def profile_of(model: Path, length: int, more: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of one step of ours in operations of each kind and in everything else; what its training half reaches.

    The training half is of the last step: the matrix products of the tokens that it computes, forwards and backwards,
    would take so long at the speed that the model's linear layers have on 1,024 tokens, outside of any training.
    """
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["PROFILE"] = str(folder / "profile.json")
        run_ours(folder, model, make_inputs(folder)[0], STEPS, length, more, PROFILED)
        seconds, rows, flop = json.loads((folder / "profile.json").read_text())
        steps = (folder / "logs" / "bench" / "ours.jsonl").read_text().splitlines()
    training = json.loads(steps[-1])["data"]["timing_s/update_actor"]
    shares = dict.fromkeys([*KINDS, "other operations"], 0.0)
    for name, shapes, spent in rows:
        words = f"{name} {shapes}".lower()
        kinds = (kind for kind, parts in KINDS.items() if any(part.format(vocab=vocab) in words for part in parts))
        shares[next(kinds, "other operations")] += spent
    products = flop / product_speed(model)
    half = {"training half, s": training, "TFLOP": flop / 1e12, "its products alone, s": products}
    half["share"] = products / training
    return {**shares, "Python and the rest": seconds - sum(shares.values()), "in all": seconds}, half


def product_speed(model: Path) -> float:
    """Operations per second of the model's linear layers, float32, on 1,024 tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = sum(module.weight.numel() for module in network.modules() if isinstance(module, torch.nn.Linear))
    return 2 * weights / linear_seconds(network, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder that examples/smollm2/model.py writes")
    parser.add_argument("--peer-python", help="python of the environment with TRL; without it only ours is timed")
    parser.add_argument("--length", type=int, nargs="+", default=[24], help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lora", action="store_true", help="also a step of an adapter of rank 32")
    parser.add_argument("--more", nargs="*", default=[], help="settings of ours, key=value")
    add_json(parser)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    figures, lines = Figures(), []
    for length in arguments.length:
        numbers = compare(length, arguments)
        figures.add(f"{length} tokens", numbers)
        lines.append(f"| {length} | {' | '.join(f'{x:.2f}' for x in numbers.values())} |")
        heads = list(numbers)
    print(f"\n| tokens of an answer, at most | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    print("\n".join(lines))
    spent, half = profile_of(arguments.model.resolve(), arguments.length[0], arguments.more)
    for name, values in (("profile", spent), ("training", half)):
        figures.add(name, values)
        print(f"\n| {name} | {' | '.join(values)} |\n|{'---|' * (len(values) + 1)}")
        print(f"| of one step | {' | '.join(f'{value:.2f}' for value in values.values())} |")
    figures.write(arguments.json)


def compare(length: int, arguments: argparse.Namespace) -> dict[str, float]:
    model = arguments.model.resolve()
    runs: dict[str, list[Run]] = {"ours": [], "LoRA": [], "TRL": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ours, theirs = make_inputs(folder)
        for _ in range(arguments.rounds):
            for name, more in {"ours": [], **({"LoRA": LORA} if arguments.lora else {})}.items():
                runs[name].append(run_ours(folder, model, ours, STEPS, length, [*more, *arguments.more]))
                show(length, name, runs[name][-1])
            if arguments.peer_python:
                peer = run_peer(folder, arguments.peer_python, model, theirs, STEPS, length, PEER_PASSES)
                runs["TRL"].append(peer)
                show(length, "TRL", peer)
    numbers: dict[str, float] = {}
    for name, made in runs.items():
        if made:
            numbers[f"{name}, s"] = statistics.median(run.medians(WARMUP)[0] for run in made)
            numbers[f"{name}, peak GB"] = max(run.peak_mib for run in made) * 2**20 / 1e9
    if arguments.peer_python:
        numbers["TRL / ours"] = numbers["TRL, s"] / numbers["ours, s"]
        for name in ("ours", "LoRA"):
            if runs[name]:
                numbers[f"{name} / TRL, memory"] = numbers[f"{name}, peak GB"] / numbers["TRL, peak GB"]
    return numbers


def show(length: int, name: str, run: Run) -> None:
    seconds = ", ".join(f"{second:.1f}" for second in run.wall)
    print(f"{length} tokens, {name}: {seconds} s a step, peak {run.peak_mib * 2**20 / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()

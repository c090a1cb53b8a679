"""Log-probs and entropy of a large vocabulary with their gradients: tiles beside the naive formula.

    OMP_NUM_THREADS=1 python benchmarks/bench_lm_head.py [--vocabulary 152064] [--tokens 4096] [--hidden 1024]

Every variant runs in a process of its own, forward and backward; memory is the peak of the resident set beyond h, W and
their gradients. The naive formula is
log_softmax plus the entropy from it. ``--entropy`` off leaves the entropy out on both sides, and adds the path for
losses whose slopes are known beforehand, which computes each logit once. Seconds are CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch
from figures import Figures, add_json, peak_mib
from torch import Tensor

from verl.models.fused_head import OnePassHead, Shape, TokenStatistics


def naive(hidden: Tensor, weight: Tensor, labels: Tensor, entropy: bool) -> Tensor:
    log_p = (hidden @ weight.t()).log_softmax(-1)
    found = log_p.gather(1, labels[:, None])[:, 0]
    return found if not entropy else found - 0.01 * (log_p.exp() * log_p).sum(-1)


def tiled(hidden: Tensor, weight: Tensor, labels: Tensor, entropy: bool, tile: int | None = None) -> Tensor:
    found = TokenStatistics.apply(hidden, weight, None, labels, Shape(tile=tile), (entropy, False))
    return found[0] if not entropy else found[0] + 0.01 * found[1]


def one_pass(hidden: Tensor, weight: Tensor, labels: Tensor, slopes: Tensor) -> Tensor:
    return OnePassHead.apply(hidden, weight, None, labels, slopes, Shape())


def measure(a: argparse.Namespace) -> None:
    """One variant in this process; prints JSON."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(a.tokens, a.hidden, generator=generator).requires_grad_()
    weight = torch.randn(a.vocabulary, a.hidden, generator=generator).mul_(a.hidden**-0.5).requires_grad_()
    labels = torch.randint(0, a.vocabulary, (a.tokens,), generator=generator)
    upstream = torch.randn(a.tokens, generator=generator)
    gradients_mib = (hidden.nbytes + weight.nbytes) / (1 << 20)
    held = peak_mib()
    start = time.process_time()
    if a.variant == "one sweep":
        found = one_pass(hidden, weight, labels, upstream)
    elif a.variant == "naive":
        found = naive(hidden, weight, labels, a.entropy)
    else:
        found = tiled(hidden, weight, labels, a.entropy, tile=a.tile)
    (found * upstream).sum().backward()
    seconds = time.process_time() - start
    peak = peak_mib() - held
    gradients = [float(hidden.grad.norm()), float(weight.grad.norm())]
    print(
        "RESULT "
        + json.dumps({"seconds": seconds, "mib": peak - gradients_mib, "sum": float(found.sum()), "norms": gradients})
    )


def run(a: argparse.Namespace, variant: str, tile: int | None = None) -> dict:
    sizes = ["--vocabulary", a.vocabulary, "--tokens", a.tokens, "--hidden", a.hidden]
    flags = (["--entropy"] if a.entropy else []) + (["--tile", tile] if tile else [])
    command = [sys.executable, __file__, "--variant", variant, *sizes, *flags]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("RESULT ")).removeprefix("RESULT "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--tile", type=int)
    parser.add_argument("--tiles", nargs="*", type=int, default=[], help="further tile sizes to try")
    parser.add_argument("--variant", choices=["naive", "tiled", "one sweep"], help="used by the script itself")
    parser.add_argument("--rounds", type=int, default=1)
    add_json(parser)
    a = parser.parse_args()
    if a.variant:
        measure(a)
        return
    print(f"V={a.vocabulary} N={a.tokens} H={a.hidden} float32, {torch.get_num_threads()} threads, entropy {a.entropy}")
    print("| variant | CPU s | peak MiB | time / naive | naive / memory | sum | norms |\n|" + "---|" * 7)
    figures = Figures()
    for _ in range(a.rounds):
        base = run(a, "naive")
        rows = [("naive", base), *((f"tile {t or 'automatic'}", run(a, "tiled", t)) for t in [None, *a.tiles])]
        if not a.entropy:
            rows.append(("one sweep, slopes known", run(a, "one sweep")))
        for name, r in rows:
            figures.add(
                name,
                {
                    "CPU s": r["seconds"],
                    "peak MiB": r["mib"],
                    "time / naive": r["seconds"] / base["seconds"],
                    "naive / memory": base["mib"] / max(r["mib"], 1),
                    "gradients apart": max(abs(x / y - 1) for x, y in zip(r["norms"], base["norms"])),
                },
            )
            print(
                f"| {name} | {r['seconds']:.1f} | {r['mib']:.0f} | {r['seconds'] / base['seconds']:.2f} "
                f"| {base['mib'] / max(r['mib'], 1):.1f} | {r['sum']:.4f} | {r['norms'][0]:.6f} {r['norms'][1]:.6f} |",
                flush=True,
            )
    figures.write(a.json)


if __name__ == "__main__":
    main()
